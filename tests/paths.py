"""Where things lie: the repository, and the shared problem sets,
which lie beside it or not at all.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MATH = ROOT.parent / "shared" / "data" / "math"
