"""Imported by a fork server: whatever modules PRELOAD names,
so that its forks need not import them again.
"""

import contextlib
import importlib
import os

for name in os.environ.get("PRELOAD", "").split():
    with contextlib.suppress(Exception):  # a module that only its package can import
        importlib.import_module(name)
