"""The NCCL that is loaded counts, not the one that torch was compiled with."""

from __future__ import annotations

import sys
from importlib import metadata

import pytest
import torch

from megatron_stare.rollout.sglang.process import nccl_version, own_nccl_version


def test_the_installed_library_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tuple(map(int, metadata.version("nvidia-nccl-cu13").split(".")))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (1, 2, 3))
    assert own_nccl_version() == installed == nccl_version([sys.executable])
