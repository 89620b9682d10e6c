"""Commands that only tell: what there is to train with, and how it is set. None imports torch, but
for the list of objectives, which is asked of their code.
"""
