"""From answer to credit: verifiers, rewards, advantages, filters."""
