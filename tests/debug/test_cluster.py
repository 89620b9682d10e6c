"""`doctor --cluster` on two real ranks, and its rendezvous from what srun sets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_stare.__main__ import main
from megatron_stare.config import Config, UserError
from megatron_stare.debug import cluster, doctor
from megatron_stare.debug.doctor import Finding
from tests.distributed import run_distributed


def examined(rank: int, world: int) -> list[list[Finding]]:
    """Two looks: as it is, and with a second host whose clock, packages and disk are others."""
    plain = cluster.examine_cluster(Config())
    if rank == 1:
        now, look = cluster.time.time, doctor.examine
        cluster.socket.gethostname = lambda: "elsewhere"
        cluster.time.time = lambda: now() + 40

        def other(config: Config) -> list[Finding]:
            found = [one for one in look(config) if one.what != "torch"]
            return [*found, Finding("OK", "torch", "1.0"), Finding("FAIL", "disk", "full", "more")]

        cluster.examine = other
    return [plain, cluster.examine_cluster(Config())]


def test_ranks_are_compared() -> None:
    (plain, strange), second = run_distributed(examined, 2)
    assert second == [[], []], "rank 0 speaks for all"
    found = {one.what: one for one in plain}
    assert found["clocks"].level == found["versions"].level == "OK"
    assert "between 2 ranks (gloo)" in found["bandwidth"].found
    found = {one.what: one for one in strange}
    assert found["clocks"].level == "FAIL"
    assert "is earlier than that of elsewhere" in found["clocks"].found
    assert found["versions"].level == "FAIL" and "torch" in found["versions"].found
    assert found["elsewhere: disk"] == Finding("FAIL", "elsewhere: disk", "full", "more")
    assert "elsewhere: python" not in found


def test_a_fault_of_any_rank_is_reported_once_for_its_host() -> None:
    """A rank looks at its own GPU."""
    fine, used = Finding("OK", "GPU memory", "free"), Finding("WARN", "GPU memory", "used", "end")
    disk = Finding("FAIL", "disk", "full", "more")
    ranks = [("a", [fine, disk]), ("a", [used, disk]), ("b", [used, disk]), ("b", [used, disk])]
    merged = cluster._merged(ranks)
    assert merged[:2] == [fine, disk]
    assert [one.what for one in merged[2:]] == ["a: GPU memory", "b: GPU memory", "b: disk"]


def test_the_options_of_srun_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "scontrol"
    program.write_text("#!/bin/sh\necho node3\necho node4\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    given = {
        "SLURM_PROCID": "9",
        "SLURM_NTASKS": "16",
        "SLURM_LOCALID": "1",
        "SLURM_JOB_ID": "71234",
        "SLURM_STEP_NODELIST": "node[3-4]",
    }
    environment = dict(given)
    cluster.from_slurm(environment)
    assert {name: environment[name] for name in environment.keys() - given.keys()} == {
        "RANK": "9",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "node3",
        "MASTER_PORT": "29634",
    }
    torchrun = given | {"RANK": "0"}
    cluster.from_slurm(torchrun)
    assert "WORLD_SIZE" not in torchrun
    monkeypatch.setenv("PATH", "/nowhere")  # as in a container
    with pytest.raises(UserError, match=r"`scontrol show hostnames node\[3-4\]` .* with torchrun"):
        cluster.from_slurm(dict(given))


def test_without_ranks_the_message_names_the_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--cluster"]) == 2
    assert "torchrun or srun" in capsys.readouterr().err


def test_the_expected_bandwidth_follows_the_links(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cluster, "INFINIBAND", tmp_path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert cluster.ceiling(8) == 450e9 and cluster.ceiling(16) == 1.25e9
    for number, state in enumerate(["4: ACTIVE", "4: ACTIVE", "1: DOWN"]):
        port = tmp_path / f"mlx5_{number}/ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
        (port / "rate").write_text("400 Gb/sec (4X NDR)")
    assert cluster.ceiling(16) == 100e9
