"""Every launched server gets GPUs of its own."""

from __future__ import annotations

import pytest
import torch

from megatron_stare.config import SGLangConfig
from megatron_stare.rollout.sglang.launch import arguments_of, placement
from megatron_stare.rollout.sglang.server import Model
from tests.tiny_models import byte_tokenizer


def test_servers_stand_beside_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SGLangConfig(num_servers=2, gpus_per_server=2, first_gpu=4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert placement(settings, 1) == ["--tp-size", "2"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert placement(settings, 0) == ["--tp-size", "2", "--base-gpu-id", "4"]
    assert placement(settings, 1) == ["--tp-size", "2", "--base-gpu-id", "6"]
    assert placement(SGLangConfig(), 0) == []


@pytest.mark.parametrize("shared", [0, 1])
def test_shared_experts_keep_their_names_on_a_server(shared: int) -> None:
    """A server on a GPU would hold them as one of the routed experts, under another name."""
    model = Model("model", "bfloat16", byte_tokenizer(), frozenset(), {"n_shared_experts": shared})
    found = arguments_of(SGLangConfig(), model, 0)
    assert ("--disable-shared-experts-fusion" in found) == bool(shared)
