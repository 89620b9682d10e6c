"""Records of training steps, so that a step can be computed again."""
