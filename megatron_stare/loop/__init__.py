"""The only place where data, rollouts, scoring, losses, policy and reporting meet."""
