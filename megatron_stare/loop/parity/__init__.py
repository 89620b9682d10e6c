"""Trainer and rollout servers on the same tokens: how far apart they are, and where that begins."""
