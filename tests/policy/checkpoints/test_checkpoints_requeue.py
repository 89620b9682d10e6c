"""Checkpoints of a Slurm job that is requeued, and on a shared disk that keeps one."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy.topology import Topology
from tests.policy.checkpoints.test_checkpoints import saved
from tests.small_run import small_config


def test_a_requeued_slurm_job_goes_back_once(
    tmp_path: Path, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm repeats the command of a requeued job, --load too."""
    options = ("run.save_interval=1", "run.keep_last=9")
    config = small_config(tmp_path, *options, "train.num_rollout=2")
    assert Trainer(config, topology).run(Interrupt())
    back = "step_00000001"
    for job, attempt, total, aside in (
        ("7", "", 3, 1),  # goes back from step 2
        ("7", "1", 4, 1),  # continues after step 3
        ("8", "0", 5, 2),  # another job, the same words: goes back again
        ("8", "0", 6, 3),  # as in an allocation in which a user types
    ):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_RESTART_COUNT", attempt)
        config = small_config(tmp_path, *options, f"train.num_rollout={total}")
        assert Trainer(config, topology, load=back).run(Interrupt())
        found = [name for name in saved(config) if "step_00000002" in name]
        assert len(found) == aside + 1, (job, attempt)


def test_an_old_checkpoint_that_cannot_be_removed_costs_only_its_room(
    tmp_path: Path,
    topology: Topology,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """NFS keeps the directory of a file that a process still reads, such as a conversion."""
    remove = shutil.rmtree

    def busy(path: Path, **options: Any) -> None:
        if path.parent.name == "checkpoints" and path.name == "step_00000001":
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", busy)
    config = small_config(tmp_path, "train.num_rollout=3", "run.save_interval=1", "run.keep_last=1")
    assert Trainer(config, topology).run(Interrupt())
    assert saved(config) == ["latest", "step_00000001", "step_00000003"]
    said = capsys.readouterr().err
    assert "Directory not empty" in said and "not written" not in said
