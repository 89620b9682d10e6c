"""Rollout workers that are processes of their own, next to the trainer on the first node."""
