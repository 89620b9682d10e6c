"""Recorded steps taken again, however their rollouts were sampled."""

from __future__ import annotations

import json
import math
import tarfile
from pathlib import Path

import pytest
import torch

from megatron_stare import config as configuration
from megatron_stare.commands.recorded import bundle
from megatron_stare.config import UserError, override
from megatron_stare.debug.replay import (
    NOISE,
    Compared,
    Replay,
    _figures,
    compare_objectives,
    replay,
)
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.metrics import Stopwatch
from megatron_stare.loop.prepare import effective_loss
from megatron_stare.loop.run_directory import read_head, recorded_steps, records_directory
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.topology import Topology
from tests.collect.lockstep import in_step
from tests.collect.test_rollout_buffer_replay import UEC
from tests.distributed import run_distributed
from tests.small_run import small_config

MANY = ("train.num_rollout=6", "run.save_interval=2", "run.keep_every=2", "run.record=all")


def trained(directory: Path, topology: Topology, *overrides: str) -> Path:
    """The directory of a run that was trained to its end."""
    run = Trainer(small_config(directory, *overrides), topology)
    assert (
        in_step(run).run(Interrupt()) if "fully_async" in str(overrides) else run.run(Interrupt())
    )
    return Path(run.config.run.dir)


def replayed(run: Path, step: int, topology: Topology) -> list[Compared]:
    return list(Replay(run, step, topology).steps())


@pytest.mark.parametrize(
    "way",
    [
        ("rollout.over_sampling_batch_size=6", "rollout.max_staleness=1"),
        ("rollout.asynchrony=one_step_off", "train.num_steps_per_rollout=2"),
        ("rollout.asynchrony=fully_async", "rollout.max_staleness=2"),
        ("rollout.resampling.method=aepo", "train.epochs=2"),
        (*UEC, "rollout.resampling.replay_interval=3"),
        ("loss.kl_loss_coef=0.1", "policy.ref_update_interval=1"),
    ],
    ids=[
        *("surplus", "one_step_off", "fully_async", "sampled_again", "trained_again"),
        "updated_reference",
    ],
)
def test_a_replay_repeats_every_step_bit_for_bit(way, tmp_path: Path, topology: Topology):
    run = trained(tmp_path, topology, *MANY, *way)
    for step in (2, 5, 6):
        found = replayed(run, step, topology)
        assert [each.step for each in found] == list(range((step - 1) // 2 * 2 + 1, step + 1))
        for each in found:
            assert each.identical, each.differing
            assert {"loss", "grad_norm", "entropy", "chosen_positive"} <= set(each.replayed)
            assert each.replayed["loss"] == each.recorded["loss"]


def test_a_replay_crosses_the_attempts_of_a_run(tmp_path: Path, topology: Topology):
    run = tmp_path / "run"
    config = small_config(tmp_path, "train.num_rollout=6", "run.save_interval=3")
    first = Trainer(config, topology)
    learn = first.learner.step

    def until_the_fifth(groups, version, *rest):
        if version == 4:
            raise InterruptedError("as a kill would")
        return learn(groups, version, *rest)

    first.learner.step = until_the_fifth  # type: ignore[method-assign]
    with pytest.raises(InterruptedError):
        first.run(Interrupt())
    assert recorded_steps(records_directory(run)) == [1, 2, 3, 4, 5]
    assert Trainer(config, topology).run(Interrupt())
    attempts = [read_head(records_directory(run), step).attempt for step in range(1, 7)]
    assert len(set(attempts[:3])) == 1 == len(set(attempts[3:])) and attempts[0] != attempts[-1]
    for step in (3, 5, 6):
        assert all(each.identical for each in replayed(run, step, topology))


def test_a_replay_names_every_difference(tmp_path: Path, topology: Topology):
    run = trained(tmp_path, topology, "train.num_rollout=2")
    file = run / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[1]["loss"] = math.nextafter(rows[1]["loss"], 1.0)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    one, two = replayed(run, 2, topology)
    assert one.identical and two.differing == ["loss"]
    (head,) = (records_directory(run) / "step_00000002").glob("step.json")
    head.write_text(head.read_text().replace('"weights": "', '"weights": "other'))
    *_, two = replayed(run, 2, topology)
    assert not two.identical and two.weights[0] == f"other{two.weights[1]}"


def test_a_replay_compares_objectives_on_the_same_tokens(tmp_path: Path, topology: Topology):
    run = trained(tmp_path, topology, "train.num_rollout=2")
    again = Replay(run, 2, topology)
    assert [each.step for each in again.before()] == [1]
    stare, grpo, gspo = compare_objectives(again, ["stare", "grpo", "gspo"])
    assert stare.differing == 0 and stare.first is None
    # The gate is open: of the same reduction and ratio 1, only the chosen tokens differ.
    chosen = stare.metrics["chosen_positive"] + stare.metrics["chosen_negative"]
    assert grpo.differing == chosen > 0 and grpo.first is not None
    preparer, watch = again.learner.preparer, Stopwatch()
    planned = preparer.prepare(again.groups(again.heads[-1]), 1, True, watch)
    preparer.plan_all(planned, watch)
    (batch,), (plan,) = planned.batches, planned.plans
    bound = again.learner.objective.bind(effective_loss(again.config))
    asked_T = again.actor.token_gradient(batch, bound, plan)[:, 0]
    # At ratio 1: d(-omega A r) / ds = omega A, times the reduction's coefficient.
    expected_T = plan.coefficient_T * plan.weight_T * batch.advantage_T
    torch.testing.assert_close(asked_T, expected_T, rtol=1e-5, atol=1e-9)
    order = batch.token_index_T.argsort()
    other = order[(plan.weight_T[order] != 1.0) & (batch.advantage_T[order] != 0)][0]
    first, by_grpo = grpo.first.asked
    assert first == pytest.approx(float(asked_T[other]), rel=1e-5)
    assert by_grpo == pytest.approx(first / float(plan.weight_T[other]), rel=1e-5)
    assert gspo.tokens == stare.tokens == len(order) and gspo.differing > 0
    with pytest.raises(UserError, match="aent"):
        compare_objectives(again, ["stare", "aent"])


def test_a_bundle_is_complete_on_another_machine(tmp_path: Path, capsys):
    """The model's files are links, as in the Hugging Face cache."""
    config = small_config(tmp_path / "mine", *MANY[:2], "loss.kl_loss_coef=0.01")
    (tmp_path / "blobs").mkdir()
    for file in list(Path(config.policy.hf_checkpoint).iterdir()):
        file.rename(tmp_path / "blobs" / file.name)
        file.symlink_to(tmp_path / "blobs" / file.name)
    with topologies.session(config.policy) as topology:
        assert Trainer(config, topology).run(Interrupt())
    run = Path(config.run.dir)
    target, size = bundle(run, 6, tmp_path / "six.tar")
    assert size == target.stat().st_size
    with pytest.raises(UserError, match="is there already"):
        bundle(run, 6, target)
    with tarfile.open(target) as archive:
        archive.extractall(tmp_path / "theirs", filter="data")
    (tmp_path / "mine").rename(tmp_path / "gone")
    (tmp_path / "blobs").rename(tmp_path / "gone blobs")
    assert replay(tmp_path / "theirs" / "run_step_6", 6, [])
    printed = capsys.readouterr().out
    assert "from checkpoint 4" in printed and "same bits" in printed and "differs" not in printed
    assert replay(tmp_path / "theirs" / "run_step_6", 6, ["stare", "grpo"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "grpo" in printed and "(id " in printed


@pytest.mark.parametrize(
    ("record", "kept"),
    [
        ("replayable", [5, 6, 7]),
        pytest.param("all", [1, 2, 3, 4, 5, 6, 7], marks=pytest.mark.slow),
        pytest.param("none", [], marks=pytest.mark.slow),
    ],
)
def test_records_are_kept_as_run_record_says(
    record: str, kept: list[int], tmp_path: Path, topology: Topology
):
    often = ("train.num_rollout=7", "run.save_interval=2", "run.keep_last=2")
    run = trained(tmp_path, topology, *often, f"run.record={record}")
    assert recorded_steps(records_directory(run)) == kept
    if record == "replayable":  # and of the checkpoints 6 and 7
        message = "step 5 is computed again from the run's first weights, and step 1 has no record"
        for refused in (lambda: replay(run, 5, []), lambda: bundle(run, 5, tmp_path / "five.tar")):
            with pytest.raises(UserError, match=rf"{message} .*; choose one of the steps 7 to 7"):
                refused()
    if record == "none":
        with pytest.raises(UserError, match=r"step 7 has no record .* run.record=replayable"):
            Replay(run, 7, topology)


def test_a_refused_replay_names_the_reason(tmp_path: Path, topology: Topology):
    run = trained(tmp_path, topology, "train.num_rollout=2")
    folder = records_directory(run) / "step_00000002"
    frames = next(folder.glob("*.frames"))
    whole = frames.read_bytes()
    frames.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"cannot be read|has \d of the 4 groups"):
        replayed(run, 2, topology)
    frames.write_bytes(whole)
    head = folder / "step.json"
    text = head.read_text()
    head.write_text(text.replace('"ranks": 1', '"ranks": 8'))
    with pytest.raises(UserError, match=r"taken by 8 ranks .* torchrun on 8 processes"):
        replayed(run, 2, topology)
    head.write_text(text)
    records = records_directory(run)
    attempt = read_head(records, 1).attempt
    other = override(configuration.load(records / f"{attempt}.yaml"), ["optimizer.lr=0.5"])
    configuration.dump(other, records / "other.yaml")
    first = records / "step_00000001" / "step.json"
    first.write_text(first.read_text().replace(attempt, "other"))
    with pytest.raises(UserError, match=r"step 1 was trained under another optimizer\.lr than"):
        replayed(run, 2, topology)


def on_ranks(rank: int, world_size: int, directory: str) -> list[tuple[bool, int]]:
    """Each replayed step: whether it is identical, and how many figures it has."""
    layout = ("policy.tensor_model_parallel_size=2",) if world_size == 4 else ()
    spread = ("policy.use_distributed_optimizer=true", *layout)
    config = small_config(
        Path(directory), "train.num_rollout=3", "run.save_interval=1", *spread, "run.record=all"
    )
    topology = topologies.start(config.policy)
    assert Trainer(config, topology).run(Interrupt())
    again = [each for step in (1, 3) for each in replayed(Path(config.run.dir), step, topology)]
    return [(each.identical, len(each.replayed)) for each in again]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_several_ranks_replay_their_steps(ranks: int, tmp_path: Path):
    small_config(tmp_path)
    for found in run_distributed(on_ranks, ranks, str(tmp_path)):
        assert len(found) == 2 and all(identical and figures > 10 for identical, figures in found)


def test_a_gpu_without_deterministic_kernels_agrees_within_the_stated_noise() -> None:
    recorded = {"loss": 1.0, "grad_norm": 2.0, "chosen": 0.0}
    near, far = recorded | {"loss": 1.01}, recorded | {"grad_norm": 2.1}
    bits = ("aa", "bb")  # fingerprints of weights after another order of additions
    assert not Compared(3, recorded, near, ("aa", "aa")).identical
    within = Compared(3, recorded, near, bits, NOISE)
    assert within.identical
    apart = Compared(3, recorded, far, bits, NOISE)
    assert apart.differing == ["grad_norm"]
    said = [list(_figures(each).columns[3].cells) for each in (apart, within)]
    assert said == [["same bits", "differs"], ["within the noise", "same bits"]]
