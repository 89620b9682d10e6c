"""Hugging Face checkpoints: their files, their names, their weights."""
