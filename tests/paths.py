"""Paths: the repository, and the shared problem sets,
which are next to it or missing.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MATH = ROOT.parent / "shared" / "data" / "math"
