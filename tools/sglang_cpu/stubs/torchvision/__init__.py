"""Stands in for torchvision, whose index build wants CUDA:
text models need its names at import and nothing else.
"""

import importlib
from enum import Enum

import absent

__version__ = "0.0.0"


class InterpolationMode(Enum):
    """torchvision's ways to resize an image: members are read at import."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


absent.install("torchvision")

for name in ("transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    importlib.import_module(f"torchvision.{name}").InterpolationMode = InterpolationMode
