"""SGLang servers as a rollout engine."""
