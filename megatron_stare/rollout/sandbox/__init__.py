"""Python from a model, run apart from everything else."""
