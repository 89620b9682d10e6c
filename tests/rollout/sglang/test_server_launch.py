"""Every launched server gets GPUs of its own."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from typing import Any

import pytest
import torch

from megatron_stare.config import Config, SGLangConfig, UserError, override
from megatron_stare.config.rollout import MEMORY_SHARE, SHARE_VARIABLE
from megatron_stare.rollout.sglang.client import ServerInfo
from megatron_stare.rollout.sglang.server import Model, arguments_of, check_modes, placement
from tests.conftest import SGLANG_PYTHON
from tests.paths import ROOT
from tests.tiny_models import byte_tokenizer

MODEL = Model("model", "bfloat16", byte_tokenizer(), frozenset(), {})


def test_servers_of_a_node_take_consecutive_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SGLangConfig(num_servers=2, gpus_per_server=2, first_gpu=4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert placement(settings, 1) == ["--tp-size", "2"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert placement(settings, 0) == ["--tp-size", "2", "--base-gpu-id", "4"]
    assert placement(settings, 1) == ["--tp-size", "2", "--base-gpu-id", "6"]
    assert placement(SGLangConfig(colocated=True), 0) == []
    assert placement(SGLangConfig(), 0) == ["--base-gpu-id", "1"], "one process trains"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert placement(SGLangConfig(), 1) == ["--base-gpu-id", "5"]
    assert placement(SGLangConfig(first_gpu=0), 0) == []


def test_colocated_servers_take_the_memory_that_the_plan_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SHARE_VARIABLE, "0.62")
    found = arguments_of(SGLangConfig(colocated=True), MODEL, 0)
    assert found[found.index(MEMORY_SHARE) + 1] == "0.62"
    given = SGLangConfig(colocated=True, server_args=f"{MEMORY_SHARE} 0.5")
    for settings in (SGLangConfig(), given):
        assert MEMORY_SHARE not in arguments_of(settings, MODEL, 0)


@pytest.mark.parametrize("shared", [0, 1])
def test_shared_experts_keep_their_names_on_a_server(shared: int) -> None:
    """A server on a GPU would hold them as one of the routed experts, under another name."""
    model = Model("model", "bfloat16", byte_tokenizer(), frozenset(), {"n_shared_experts": shared})
    found = arguments_of(SGLangConfig(), model, 0)
    assert ("--disable-shared-experts-fusion" in found) == bool(shared)


def test_servers_do_not_round_logits_that_the_trainer_does_not_round() -> None:
    wide = dataclasses.replace(MODEL, fp32_logits=True)
    assert "--enable-fp32-lm-head" in arguments_of(SGLangConfig(), wide, 0)
    assert "--enable-fp32-lm-head" not in arguments_of(SGLangConfig(), MODEL, 0)
    with pytest.raises(UserError, match=r"policy\.fp32_logits=true does not; start it with --enab"):
        check_modes("url", INFO, wide, SGLangConfig())
    check_modes("url", dataclasses.replace(INFO, fp32_logits=True), wide, SGLangConfig())


def speculating(monkeypatch: pytest.MonkeyPatch, on_gpu: bool) -> list[str]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    return arguments_of(SGLangConfig(speculation="ngram", max_concurrency=95), MODEL, 0)


def test_a_speculating_server_drafts_one_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    found = speculating(monkeypatch, True)
    assert found[-10:] == [
        *("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "5"),
        *("--speculative-ngram-min-bfs-breadth", "1", "--speculative-ngram-max-bfs-breadth", "1"),
        *("--max-running-requests", "95"),
    ]
    assert "NGRAM" not in arguments_of(SGLangConfig(), MODEL, 0)
    with pytest.raises(UserError, match=r"speculation=ngram needs servers on GPUs"):
        speculating(monkeypatch, False)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("sglang.deterministic=true",), "sglang.deterministic=true, which promises"),
        (("policy.routing_replay=rollout",), "whose expert choices these servers do not return"),
        (("sglang.server_args=--max-running-requests 8",), "--max-running-requests 8, fewer than"),
        (("sglang.server_args=--speculative-accept-threshold-acc 0.9",), "inexact"),
        (("sglang.server_args=--speculative-algorithm EAGLE3",), "set sglang.speculation"),
    ],
)
def test_settings_that_exclude_speculation_are_refused(
    settings: tuple[str, ...], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        override(Config(), ["sglang.speculation=ngram", *settings])


INFO = ServerInfo("model", "qwen3", "cuda", "bfloat16", 64, 64, 1, 1, "")


@pytest.mark.parametrize(
    ("changes", "speculation", "words"),
    [
        ({"speculation": "ngram"}, "none", "speculates by ngram, not by sglang.speculation=none"),
        ({}, "ngram", "speculates by none, not by"),
        ({"speculation": "eagle3"}, "ngram", "speculates by eagle3"),
        ({"speculation": "ngram", "device": "cpu"}, "ngram", "greedily at any temperature"),
        ({"speculation": "ngram", "accept_threshold": 0.9}, "ngram", "does not sample from"),
        ({"speculation": "ngram"}, "ngram", ""),
    ],
)
def test_attached_servers_must_speculate_as_configured(
    changes: dict[str, Any], speculation: Any, words: str
) -> None:
    info, settings = dataclasses.replace(INFO, **changes), SGLangConfig(speculation=speculation)
    if not words:
        check_modes("url", info, MODEL, settings)
        return
    with pytest.raises(UserError, match=words):
        check_modes("url", info, MODEL, settings)


PARSER = """
import argparse, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
found = parser.parse_args(["--model-path", "none", *sys.argv[1:]])
drafts = found.speculative_num_draft_tokens, found.speculative_ngram_max_bfs_breadth
print(found.speculative_algorithm, *drafts, found.max_running_requests, found.load_format)
print(found.enable_fp32_lm_head)
"""


@pytest.mark.sglang
def test_sglang_reads_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own parser; a server that drafts needs a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = dataclasses.replace(MODEL, encoded=frozenset({"a"}), fp32_logits=True)
    settings = SGLangConfig(speculation="ngram", max_concurrency=95)
    words = [str(SGLANG_PYTHON), "-c", PARSER, *arguments_of(settings, model, 0)]
    places = {"PYTHONPATH": str(ROOT / "tools/sglang_cpu/stubs"), "SGLANG_USE_CPU_ENGINE": "1"}
    done = subprocess.run(words, env=os.environ | places, capture_output=True, text=True)
    assert done.stdout.split()[-6:] == ["NGRAM", "5", "1", "95", "dummy", "True"], done.stderr[
        -3000:
    ]
