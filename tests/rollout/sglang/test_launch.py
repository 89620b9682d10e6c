"""Every launched server gets GPUs of its own."""

from __future__ import annotations

import pytest
import torch

from megatron_stare.config import SGLangConfig
from megatron_stare.rollout.sglang.launch import placement


def test_servers_stand_beside_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SGLangConfig(num_servers=2, gpus_per_server=2, first_gpu=4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert placement(settings, 1) == ["--tp-size", "2"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert placement(settings, 0) == ["--tp-size", "2", "--base-gpu-id", "4"]
    assert placement(settings, 1) == ["--tp-size", "2", "--base-gpu-id", "6"]
    assert placement(SGLangConfig(), 0) == []
