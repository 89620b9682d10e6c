"""The null device: CUDA without a GPU. README.md says what it answers."""
