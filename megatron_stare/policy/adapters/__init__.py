"""Low-rank adapters (LoRA, arXiv 2106.09685) of a frozen GPTModel."""
