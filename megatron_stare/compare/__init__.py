"""Several runs from one start."""
