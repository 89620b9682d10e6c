"""Training checkpoints: saved whole or not at all, hashed, resumable."""
