"""Hugging Face <-> Megatron, one parameter at a time."""
