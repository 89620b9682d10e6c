"""Held-out problems, resumable."""
