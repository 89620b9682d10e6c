"""Low-precision checkpoints for rollouts, and the error that this makes."""
