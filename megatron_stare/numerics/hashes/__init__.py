"""Hashes of tensors, computed where they are: our own of weights, and that of servers on GPUs."""
