"""Layers of the model where there is no TransformerEngine."""
