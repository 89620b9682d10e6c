"""The path from answer to credit: verifiers, rewards, advantages, filters."""
