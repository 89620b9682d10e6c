"""Any agent through a token-exact model endpoint: an episode becomes one rollout of sequences."""
