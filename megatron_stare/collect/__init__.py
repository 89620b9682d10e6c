"""The batch of a step: what is sampled, judged and kept for training."""
