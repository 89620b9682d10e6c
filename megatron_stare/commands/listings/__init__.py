"""Commands that only print: what there is to train with, and how it is set. None imports torch,
except for one objective in full, which is read from its code.
"""
