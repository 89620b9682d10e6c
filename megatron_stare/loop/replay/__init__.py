"""What a step trained on, kept, so that it can be taken again."""
