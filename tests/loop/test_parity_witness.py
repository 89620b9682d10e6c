"""A run whose engine samples with other log-probs than the trainer has: what it writes, and that it
does not begin where it is asked to look first.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_stare.config import Config, MismatchAlarm, override
from megatron_stare.debug.parity import _prepared
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.parity import Witness
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.huggingface.weights import HFWeights
from megatron_stare.rollout.episodes import EpisodeEngine
from tests.small_run import rows_of, small_config

QUICK = ("train.num_rollout=2", "rollout.dynamic_sampling=false")


@pytest.fixture
def astray(monkeypatch: pytest.MonkeyPatch) -> None:
    """One weight of the engine is another than the trainer's."""
    sound = HFWeights.__iter__

    def wrong(weights: HFWeights):
        for name, tensor in sound(weights):
            yield name, tensor * 2 if name == "model.layers.1.mlp.down_proj.weight" else tensor

    monkeypatch.setattr(HFWeights, "__iter__", wrong)


def trained(config: Config) -> bool:
    with topologies.session(config.policy) as topology, Interrupt() as interrupt:
        return Trainer(config, topology).run(interrupt)


def test_a_run_of_episodes_compares_single_responses() -> None:
    """Of an agent too: requests without a row start no episode."""
    engine: Any = EpisodeEngine.__new__(EpisodeEngine)
    engine.engine, given = SimpleNamespace(), SimpleNamespace(topology=None)
    witness = Witness(Config(), given, engine, given, given)  # type: ignore[arg-type]
    assert witness.engine is engine.engine
    config = _prepared(override(Config(), ["agents.function=my.agent"]), 4)
    assert not config.agents.active


def tables(config: Config) -> list[str]:
    return sorted(path.name for path in Path(config.run.dir).glob("parity_step_*"))


@pytest.mark.usefixtures("astray")
def test_tables_are_written_if_engine_and_trainer_differ(tmp_path):
    """Once in alarms.window steps, where the batch was scored first and where it was not; before
    the run ends, too.
    """
    config = small_config(tmp_path, *QUICK, "alarms.mismatch=1e-3")
    unscored = (
        "loss.name=grpo",
        "loss.variant=O1",
        "loss.adaptive=false",
        "loss.alpha=0.01",
        "train.num_rollout=1",
    )
    masked = (
        "mismatch.alarm=1e-3",
        "mismatch.on_alarm=mask",
        "alarms.mismatch=0",
        "train.num_rollout=1",
    )
    for name, more in {"reported": (), "unscored": unscored, "masked": masked}.items():
        run = override(config, [f"run.dir={tmp_path / name}", *more])
        assert trained(run)
        assert tables(run) == ["parity_step_00000001.txt"]
        assert rows_of(run)[0]["logprob_diff_mean"] > 1e-3
    stopped = override(config, [f"run.dir={tmp_path / 'stopped'}", "mismatch.alarm=1e-3"])
    with pytest.raises(MismatchAlarm, match="differ by"):
        trained(stopped)
    (name,) = tables(stopped)
    table = (tmp_path / "stopped" / name).read_text()
    assert "decode - trainer: first apart at response" in table
    assert "sequences of the batch" in table


def test_a_run_starts_if_engine_and_trainer_agree(tmp_path):
    """The comparison changes no state: the metrics are those of a run without it."""
    config = small_config(tmp_path, *QUICK, "train.num_rollout=1")
    looking = override(config, ["mismatch.parity_before=3", f"run.dir={tmp_path / 'looking'}"])
    assert trained(config) and trained(looking)
    assert rows_of(looking) == rows_of(config)
    assert not tables(looking)


@pytest.mark.usefixtures("astray")
def test_a_run_does_not_start_if_engine_and_trainer_differ(tmp_path, capsys):
    config = small_config(tmp_path, "mismatch.parity_before=3", "mismatch.alarm=1e-3")
    with pytest.raises(MismatchAlarm, match=r"before training, .* nats a token, above 0\.001: "):
        trained(config)
    assert "decode - trainer" in capsys.readouterr().out
    assert not (tmp_path / "run/metrics.jsonl").exists() or not rows_of(config)


def test_the_worst_sequences_are_found():
    """Means of fresh tokens only; a sequence without any is not apart at all."""
    from megatron_stare.loop.parity import _apart
    from megatron_stare.records import TokenBatch

    sequence = torch.tensor([0, 0, 1, 2, 2])
    batch = TokenBatch(
        (),
        *(torch.zeros(5), torch.tensor([-1.0, -2.0, -9.0, -3.0, -1.0]), sequence),
        *(torch.ones(5), torch.arange(5), torch.zeros(5)),
        torch.tensor([True, True, False, True, False]),
        3,
        surprisal_T=torch.tensor([1.5, 2.0, 1.0, 1.0, 5.0]),
    )
    assert _apart(batch, None).tolist() == [0.25, 0.0, 2.0]
    batch = dataclasses.replace(batch, off_temperature_T=sequence == 2)
    assert _apart(batch, None).tolist() == [0.25, 0.0, 0.0], "of another temperature"
