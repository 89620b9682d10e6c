"""What every test run does: tests that need a CUDA device or an SGLang server are skipped, with the reason, without."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

SGLANG_PYTHON = Path(os.environ.get("SGLANG_PYTHON", Path(__file__).parents[1] / ".venv-sglang" / "bin" / "python"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {
        "gpu": "" if torch.cuda.is_available() else "no GPU here",
        "sglang": "" if os.access(SGLANG_PYTHON, os.X_OK) else f"no {SGLANG_PYTHON}: run `make sglang`",
    }
    for item in items:
        for marker, reason in missing.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
