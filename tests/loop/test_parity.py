"""The named cause of a difference; the command on the embedded engine."""

from __future__ import annotations

import json

import numpy
import pytest

from megatron_stare.__main__ import main
from megatron_stare.config import Config, dump, override
from megatron_stare.loop.parity import _COLD, beyond, cause, limit
from megatron_stare.reporting.logprob_table import Parity
from tests.small_run import small_config

TRUE = -numpy.linspace(0.5, 4.0, 20)


def parity(decode=0.0, prefill=0.0, alone=0.0, cold=None) -> Parity:
    """Columns that lie this far from the trainer's; `cold`: the sampling temperature is another
    than 1, and this is how far the decode column lies from the trainer's at 1.
    """
    columns = {
        "decode": [TRUE + decode],
        "prefill": [TRUE + prefill],
        "trainer": [TRUE],
        "trainer alone": [TRUE + alone],
    }
    pairs = [("decode", "trainer"), ("prefill", "trainer"), ("trainer", "trainer alone")]
    if cold is not None:
        columns[_COLD] = [TRUE + decode + cold]
        columns["prefill"] = [columns[_COLD][0] + prefill]
        pairs[1] = ("prefill", _COLD)
    return Parity(columns, [numpy.arange(20)], pairs)


CASES = {
    "weights": (parity(0.5, 0.5), "server: lm_head.weight has checksum 1", "logits"),
    "temperature": (parity(0.5, cold=0.0), "", ""),
    "the trainer: layer 1": (parity(0.5, 0.5), "", "layer 1: key with rope"),
    "the trainer: a response": (parity(0.5, 0.5, alone=0.5), "", ""),
    "decoding": (parity(0.5, cold=0.4), "", ""),
    "decoding: the server": (parity(0.5), "", ""),
    "kernels": (parity(0.5, 0.5), "", ""),
}


@pytest.mark.parametrize("words", CASES)
def test_parity_names_the_cause(words):
    found, wrong, operation = CASES[words]
    assert beyond(found, 0.1)
    assert cause(found, 0.1, wrong, operation).startswith(words)


def test_parity_lists_tokens_beyond_the_limit():
    assert not beyond(parity(0.05, 0.05, 0.05), 0.1)
    assert [each.pair for each in beyond(parity(0.5), 0.1)] == ["decode - trainer"]
    assert [each.pair for each in beyond(parity(alone=0.2), 0.1)] == ["trainer - trainer alone"]
    assert limit(override(Config(), ["mismatch.alarm=0.02"])) == 0.02
    assert limit(override(Config(), ["alarms.mismatch=0.03"])) == 0.03
    assert limit(override(Config(), ["alarms.mismatch=0"])) == 0.1


def test_the_command_on_the_embedded_engine(tmp_path, capsys):
    """At another temperature than 1, and with a bound that no rounding keeps."""
    config = small_config(tmp_path, "rollout.rollout_temperature=0.7", "mismatch.alarm=1e-12")
    dump(config, tmp_path / "config.yaml")
    assert main(["parity", str(tmp_path / "config.yaml"), "--prompts", "3"]) == 1
    printed = capsys.readouterr().out
    assert "first operation that is not bitwise equal" in printed or "every operation" in printed
    assert "beyond 1e-12 nats: " in printed
    found = json.loads((tmp_path / "run/parity.json").read_text())
    names = [each["pair"] for each in found["pairs"]]
    assert names == ["decode - trainer", "trainer - trainer alone"]
    assert found["step"] == 0 and all(each["largest"] < 1e-4 for each in found["pairs"])
    assert found["pairs"][0]["tokens"] > 10


@pytest.mark.parametrize(
    ("options", "words"),
    {
        ("--prompts", "0"): "--prompts 0",
        ("--tokens", "99"): "rollout_max_response_len=12",
    }.items(),
)
def test_impossible_requests_are_refused(options, words, tmp_path, capsys):
    dump(small_config(tmp_path), tmp_path / "config.yaml")
    assert main(["parity", str(tmp_path / "config.yaml"), *options]) == 2
    assert words in capsys.readouterr().err
