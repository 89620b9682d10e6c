"""Attention and norm for machines without TransformerEngine, such as a CPU."""
