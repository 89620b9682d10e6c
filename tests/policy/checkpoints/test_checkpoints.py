"""Checkpoints: killed at random moments, damaged, on a full disk, under another layout."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from transformers import AutoConfig

from megatron_stare.collect.batch import Collected
from megatron_stare.config import Config, UserError, load
from megatron_stare.loop import progress
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy import manifest
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.conversion import convert
from megatron_stare.policy.model import PolicyModel
from megatron_stare.policy.model_state import read_metadata
from megatron_stare.policy.topology import Topology
from tests.conftest import fill
from tests.distributed import run_distributed, start_ranks
from tests.small_run import rows_of, small_config
from tests.tiny_models import byte_tokenizer, tiny_config, write_checkpoint


def saved(config: Config) -> list[str]:
    return sorted(path.name for path in (Path(config.run.dir) / "checkpoints").iterdir())


def weights_of(config: Config, topology: Topology) -> dict[str, torch.Tensor]:
    """The weights of the run's latest checkpoint."""
    checkpoints, target = Path(config.run.dir) / "checkpoints", Path(config.run.dir) / "exported"
    shutil.rmtree(target, ignore_errors=True)
    convert.megatron_to_hf(checkpoints / (checkpoints / "latest").read_text(), target, topology)
    return load_file(target / "model.safetensors")


def assert_same_run(config: Config, reference: Config, topology: Topology) -> None:
    """Metrics and final weights equal bit for bit."""
    assert rows_of(config) == rows_of(reference)
    ours, theirs = weights_of(config, topology), weights_of(reference, topology)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def attempt(rank: int, world_size: int, config: Config) -> None:
    """One attempt of a training process."""
    Trainer(config, topologies.start(config.policy, config.run.seed)).run(Interrupt())


def kill_in_mid_attempt(
    config: Config,
    ranks: Sequence[multiprocessing.Process],
    dice: random.Random,
    inside_a_save: bool,
) -> bool:
    """Kill -9 at a random moment after the ranks' first step, or while they write a checkpoint: one
    of them, then the others, as a launcher does. False: it had ended.
    """
    child, *others = dice.sample(ranks, len(ranks))
    run = Path(config.run.dir)
    checkpoints, metrics = run / "checkpoints", run / "metrics.jsonl"
    before = metrics.stat().st_mtime_ns if metrics.exists() else 0
    deadline = time.monotonic() + 180
    while child.is_alive() and not (
        metrics.exists() and metrics.stat().st_mtime_ns > before and rows_of(config)
    ):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    if inside_a_save:
        while child.is_alive() and not any(checkpoints.glob(".writing_*")):
            pass  # a save takes milliseconds here
        time.sleep(dice.random() * 0.02)
    else:
        time.sleep(dice.random() * 0.3)
    killed = child.is_alive()
    os.kill(child.pid, signal.SIGKILL)
    time.sleep(dice.random() * 0.1)
    for other in others:
        other.kill()
    for each in ranks:
        each.join()
    return killed


# One rank; four of which each writes a quarter of the optimizer's state; adapters cut in two.
WORLDS = {
    "one": (1, ("policy.use_distributed_optimizer=false",)),
    "four": (4, ("policy.use_distributed_optimizer=true",)),
    "adapters": (
        2,
        (
            *("policy.use_distributed_optimizer=true", "policy.tensor_model_parallel_size=2"),
            *("policy.sequence_parallel=true", "adapters.rank=4", "adapters.alpha=8"),
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("mode", ["run.async_save=false", "run.async_save=true"])
def test_ten_kills_at_random_moments_change_nothing(
    mode: str, world: str, tmp_path: Path, topology: Topology
) -> None:
    count, layout = WORLDS[world]
    steps = ("train.num_rollout=30", "run.save_interval=2", "optimizer.lr_decay_iters=30", mode)
    whole = small_config(tmp_path, *steps, *layout, f"run.dir={tmp_path}/whole")
    run_distributed(attempt, count, whole)
    config = small_config(tmp_path, *steps, *layout, f"run.dir={tmp_path}/killed")
    dice = random.Random(f"{mode} {world}")
    for kills in range(10):
        with tempfile.TemporaryDirectory() as folder:
            ranks = start_ranks(attempt, count, folder, config)
            assert kill_in_mid_attempt(config, ranks, dice, inside_a_save=kills % 2 == 1), (
                "the run ended before ten kills"
            )
    run_distributed(attempt, count, config)
    assert [row["step"] for row in rows_of(config)] == list(range(1, 31))
    assert not list((tmp_path / "killed/checkpoints").glob("set_aside_*"))
    assert_same_run(config, whole, topology)


def test_a_save_leaves_no_process(tmp_path: Path, topology: Topology) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    Trainer(small_config(tmp_path, "run.save_interval=1"), topology).run(Interrupt())
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_a_background_save_holds_the_state_of_its_start(tmp_path: Path, topology: Topology) -> None:
    options = ("train.num_rollout=6", "run.save_interval=1", "run.keep_last=6")
    at_once = small_config(tmp_path, *options, f"run.dir={tmp_path}/a")
    later = small_config(tmp_path, *options, f"run.dir={tmp_path}/b", "run.async_save=true")
    for config in (at_once, later):
        assert Trainer(config, topology).run(Interrupt())
    assert (
        saved(at_once) == saved(later) == ["latest", *(f"step_{step:08d}" for step in range(1, 7))]
    )
    for step in range(1, 7):
        for config in (at_once, later):
            (Path(config.run.dir) / "checkpoints/latest").write_text(f"step_{step:08d}")
        assert_same_run(later, at_once, topology)


def test_a_run_starts_from_a_converted_checkpoint_too(tmp_path: Path, topology: Topology) -> None:
    plain = small_config(tmp_path, f"run.dir={tmp_path}/plain", "loss.kl_loss_coef=0.1")
    converted = tmp_path / "converted"
    convert.hf_to_megatron(Path(plain.policy.hf_checkpoint), converted, topology)
    options = (
        f"run.dir={tmp_path}/other",
        f"policy.hf_checkpoint={converted}",
        "loss.kl_loss_coef=0.1",
    )
    config = small_config(tmp_path, *options)
    for one in (plain, config):
        assert Trainer(one, topology).run(Interrupt())
    assert_same_run(config, plain, topology)
    kept = load(tmp_path / "other/checkpoints/step_00000003/config.yaml")
    assert kept == config


def test_keep_last_and_keep_every_select_the_kept_checkpoints(
    tmp_path: Path, topology: Topology
) -> None:
    options = ("train.num_rollout=7", "run.save_interval=1", "run.keep_last=2", "run.keep_every=3")
    config = small_config(tmp_path, *options)
    assert Trainer(config, topology).run(Interrupt())
    assert saved(config) == ["latest", *(f"step_{step:08d}" for step in (3, 6, 7))]


def damage(checkpoint: Path, kind: str) -> str:
    """Damage the checkpoint's largest file; its name."""
    file = max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    if kind == "missing":
        file.unlink()
    elif kind == "truncated":
        file.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 3] ^= 16
        file.write_bytes(content)
    return file.name


@pytest.mark.parametrize(
    "kind",
    [
        "bit flip",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("missing", "truncated")),
    ],
)
def test_a_damaged_checkpoint_is_named_and_an_older_one_taken_on_request(
    kind: str, tmp_path: Path, topology: Topology, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("run.save_interval=2", "run.keep_last=3", "optimizer.lr_decay_iters=8")
    whole = small_config(tmp_path, "train.num_rollout=8", f"run.dir={tmp_path}/whole", *options)
    assert Trainer(whole, topology).run(Interrupt())
    options = (f"run.dir={tmp_path}/damaged", *options)
    assert Trainer(small_config(tmp_path, "train.num_rollout=6", *options), topology).run(
        Interrupt()
    )
    config = small_config(tmp_path, "train.num_rollout=8", *options)
    checkpoints = tmp_path / "damaged/checkpoints"
    name = damage(checkpoints / "step_00000006", kind)
    before = {path: path.read_bytes() for path in checkpoints.rglob("*") if path.is_file()}

    with pytest.raises(UserError, match=f"step_00000006 is damaged: {name}.*latest-good"):
        Trainer(config, topology).run(Interrupt())
    assert {path: path.read_bytes() for path in checkpoints.rglob("*") if path.is_file()} == before

    assert Trainer(config, topology, load="latest-good").run(Interrupt())
    assert name in capsys.readouterr().err
    aside = checkpoints / "set_aside_0_step_00000006"
    kept = {path.name: path.read_bytes() for path in aside.iterdir()}
    assert kept == {
        path.name: content
        for path, content in before.items()
        if path.parent.name == "step_00000006"
    }
    assert_same_run(config, whole, topology)


class Command:
    """Unpickled, it writes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.target}'",)


def poison_metadata(checkpoint: Path, command: Command) -> None:
    reader = FileSystemReader(checkpoint)
    metadata = reader.read_metadata()
    metadata.planner_data = command
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def poison_objects(checkpoint: Path, command: Command) -> None:
    """Every object that is not a tensor becomes the command, inside of honest metadata."""
    metadata = FileSystemReader(checkpoint).read_metadata()
    torch.save([command], checkpoint / "__9_9.distcp")
    size, poisoned = (checkpoint / "__9_9.distcp").stat().st_size, 0
    for index, info in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata):
            info.relative_path, info.offset, info.length = "__9_9.distcp", 0, size
            poisoned += 1
    assert poisoned
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("poison", [poison_metadata, poison_objects])
def test_a_foreign_checkpoint_runs_no_code(
    poison: Callable[[Path, Command], None], tmp_path: Path, topology: Topology
) -> None:
    options = ("run.save_interval=1", "train.num_rollout=1")
    assert Trainer(small_config(tmp_path, *options), topology).run(Interrupt())
    longer = small_config(tmp_path, *options[:1], "train.num_rollout=2")
    checkpoint = Path(longer.run.dir) / "checkpoints" / "step_00000001"
    poison(checkpoint, Command(tmp_path / "ran"))
    manifest.write(checkpoint, {})
    wanted = ".metadata is damaged" if poison is poison_metadata else "objects that are no data"
    with pytest.raises(UserError, match=f"step_00000001.*{wanted}"):
        Trainer(longer, topology).run(Interrupt())
    assert not (tmp_path / "ran").exists()
    FileSystemReader(checkpoint).read_metadata()
    if poison is poison_metadata:
        assert (tmp_path / "ran").exists(), "the poison works where nothing stops it"


def test_a_named_checkpoint_is_loaded_and_an_unknown_one_refused(
    tmp_path: Path, topology: Topology
) -> None:
    options = ("run.save_interval=1", "run.keep_last=3", "train.num_rollout=3")
    config = small_config(tmp_path, *options)
    assert Trainer(config, topology).run(Interrupt())
    before = rows_of(config)
    with pytest.raises(UserError, match=r"--load step_9: .*step_00000003"):
        Trainer(config, topology, load="step_9").run(Interrupt())
    assert Trainer(config, topology, load="step_00000001").run(Interrupt())
    assert rows_of(config) == before
    assert {"set_aside_0_step_00000002", "set_aside_0_step_00000003"} < set(saved(config))


def test_a_copy_next_to_the_checkpoints_is_not_a_checkpoint(
    tmp_path: Path, topology: Topology
) -> None:
    """`int` would read step_00000002_2 as step 22, and cannot read step_00000002.bak."""
    config = small_config(tmp_path, "run.save_interval=1", "train.num_rollout=2")
    assert Trainer(config, topology).run(Interrupt())
    checkpoints = tmp_path / "run/checkpoints"
    for name in ("step_00000002_2", "step_00000002.bak", "step_9"):
        shutil.copytree(checkpoints / "step_00000002", checkpoints / name)
    longer = small_config(tmp_path, "run.save_interval=1", "train.num_rollout=4")
    assert Trainer(longer, topology).run(Interrupt())
    assert [row["step"] for row in rows_of(longer)] == [1, 2, 3, 4]
    assert {"step_00000002_2", "step_00000002.bak", "step_9"} < {*saved(longer)}


def test_a_full_disk_costs_only_the_checkpoint(
    small_disk: Path, tmp_path: Path, topology: Topology, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (
        "run.save_interval=2",
        "run.keep_last=1",
        "optimizer.lr_decay_iters=6",
        "train.num_rollout=6",
    )
    whole = small_config(tmp_path, f"run.dir={tmp_path}/whole", *options)
    assert Trainer(whole, topology).run(Interrupt())
    config = small_config(tmp_path, f"run.dir={small_disk}/run", *options)
    short = small_config(tmp_path, f"run.dir={small_disk}/run", *options, "train.num_rollout=2")
    assert Trainer(short, topology).run(Interrupt())
    filler = fill(small_disk, leave=60 << 10)  # room for the metrics, not for a checkpoint

    with pytest.raises(UserError, match="No space left"):
        Trainer(config, topology).run(Interrupt())
    warning = capsys.readouterr().err
    assert "checkpoint 4 not written: " in warning and "No space left" in warning
    assert [row["step"] for row in rows_of(config)] == [1, 2, 3, 4, 5, 6]
    assert saved(config) == ["latest", "step_00000002"]

    filler.unlink()
    assert Trainer(config, topology).run(Interrupt())
    assert_same_run(config, whole, topology)


def test_a_disk_that_is_full_for_some_steps_loses_no_data(
    small_disk: Path, tmp_path: Path, topology: Topology, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even a byte is left in steps 3 and 4: rows, records, diagnostics and alarms wait or are
    left out.
    """
    options = ("diagnostics.interval=1", "alarms.mismatch=1e-9", "alarms.window=2")
    config = small_config(
        tmp_path, f"run.dir={small_disk}/run", "train.num_rollout=6", "run.record=all", *options
    )
    trainer = Trainer(config, topology)
    collect = trainer.collector.collect

    def with_disk(step: int) -> Collected:
        if step == 2:
            fill(small_disk, leave=0)
        if step == 4:
            (small_disk / "filler").unlink()
        return collect(step)

    trainer.collector.collect = with_disk  # type: ignore[method-assign]
    assert trainer.run(Interrupt())
    assert [row["step"] for row in rows_of(config)] == [1, 2, 3, 4, 5, 6]
    assert "metrics wait in memory" in capsys.readouterr().err
    assert saved(config) == ["latest", "step_00000006"]


BF16 = "policy.dtype=bf16"


def sampled_ahead(rank: int, world_size: int, base: Path) -> None:
    config = small_config(
        base,
        *("rollout.asynchrony=one_step_off", "rollout.max_staleness=1", "run.save_interval=1"),
        *("loss.kl_loss_coef=0.1", "policy.ref_update_interval=1", "train.num_rollout=2", BF16),
    )
    Trainer(config, topologies.start(config.policy)).run(Interrupt())


def test_a_checkpoint_with_rollouts_and_a_reference_converts(
    tmp_path: Path, topology: Topology
) -> None:
    """Several ranks write rollouts next to the model. Its first config.json says fp32."""
    policy = small_config(tmp_path, BF16).policy
    run_distributed(sampled_ahead, 2, tmp_path)
    checkpoint = tmp_path / "run/checkpoints/step_00000001"
    names = {key.split(".")[0] for key in read_metadata(checkpoint).state_dict_metadata}
    assert {"loop", "reference", "optimizer", "decoder"} <= names
    convert.megatron_to_hf(checkpoint, tmp_path / "hf", topology)
    stored, converted = (
        PolicyModel(f"{place}", policy, topology, 1.0) for place in (checkpoint, tmp_path / "hf")
    )
    assert converted.fingerprint() == stored.fingerprint()
    assert AutoConfig.from_pretrained(tmp_path / "hf").dtype == torch.bfloat16


def relayout(rank: int, world_size: int, base: Path) -> list[list[dict]]:
    """Two steps under one layout, two more under it and under each of three others. The reference
    model is updated after the second.
    """
    common = (
        *("optimizer.lr_decay_iters=4", "policy.use_distributed_optimizer=true"),
        *("loss.kl_loss_coef=0.1", "policy.ref_update_interval=2"),
    )
    layouts = {
        "tensor": ("policy.tensor_model_parallel_size=2",),
        "pipeline": ("policy.pipeline_model_parallel_size=2",),
        "context": ("policy.context_parallel_size=2", "policy.packed_sequences=true"),
        "data": (),
    }
    first = small_config(
        base, f"run.dir={base}/first", "train.num_rollout=2", *common, *layouts["tensor"]
    )
    Trainer(first, topologies.start(first.policy)).run(Interrupt())
    found = []
    for name, layout in layouts.items():
        config = small_config(
            base, f"run.dir={base}/{name}", "train.num_rollout=4", *common, *layout
        )
        if rank == 0:
            shutil.copytree(base / "first", base / name)
        torch.distributed.barrier()
        Trainer(config, topologies.start(config.policy)).run(Interrupt())
        found.append(rows_of(config))
    return found


@pytest.mark.slow
def test_another_layout_resumes_from_the_same_checkpoint(tmp_path: Path) -> None:
    small_config(tmp_path)
    found = run_distributed(relayout, 2, tmp_path)[0]
    for rows in found[1:]:
        assert [row["step"] for row in rows] == [1, 2, 3, 4]
        for ours, theirs in zip(rows, found[0], strict=True):
            for name in ("loss", "grad_norm", "entropy", "reward", "weight_w", "reference_kl"):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
        assert abs(rows[2]["reference_kl"]) < 1e-6 < abs(rows[3]["reference_kl"])


def expert_runs(
    rank: int, world_size: int, base: Path, model: Path
) -> tuple[list[dict], list[dict], list[dict]]:
    """Experts spread over both ranks: three steps in one go; two, and one more;
    then one on each rank's own experts alone.
    """
    common = (
        f"policy.hf_checkpoint={model}",
        "optimizer.lr_decay_iters=4",
        "policy.use_distributed_optimizer=true",
    )

    def run(name: str, steps: int, spread: int = 2) -> list[dict]:
        layout = f"policy.expert_model_parallel_size={spread}"
        config = small_config(
            base, f"run.dir={base}/{name}", f"train.num_rollout={steps}", *common, layout
        )
        Trainer(config, topologies.start(config.policy)).run(Interrupt())
        return rows_of(config)

    whole = run("whole", 4)
    run("parts", 2)
    parts = run("parts", 3)
    return whole, parts, run("parts", 4, spread=1)


@pytest.mark.slow
def test_experts_resume_bit_for_bit_and_each_on_one_rank(tmp_path: Path) -> None:
    small_config(tmp_path)
    model = write_checkpoint(
        tmp_path / "experts", tiny_config("qwen3_moe", vocab_size=257, max_position_embeddings=64)
    )
    byte_tokenizer().save_pretrained(model)
    whole, parts, alone = run_distributed(expert_runs, 2, tmp_path, model)[0]
    assert len(parts) == 3 and parts == whole[:3]
    assert len(alone) == 4
    for name in ("loss", "grad_norm", "entropy", "reward", "weight_w"):
        assert alone[3][name] == pytest.approx(whole[3][name], rel=1e-4, abs=1e-6), name


def test_every_generator_is_restored(topology: Topology) -> None:
    def draw() -> list[float]:
        import numpy as np

        return [random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002

    draw()
    state = progress.random_state()
    first = draw()
    assert draw() != first
    progress.restore_random_state([state], 0)
    assert draw() == first
    again = draw()
    progress.restore_random_state([state, state], 0)  # a run on another number of ranks
    assert draw() != again
