"""Commands that only tell: what there is to train with, and how it is set. None imports torch, but
for one objective in full, which is asked of its code.
"""
