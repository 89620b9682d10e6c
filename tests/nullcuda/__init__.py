"""Whole runs on the null device (tools/nullcuda)."""
