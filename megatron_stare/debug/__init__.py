"""Checks before a run, and tools that take a finished one apart: steps computed again."""
