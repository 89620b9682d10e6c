"""A run on real Slurm, with real servers too, through every fault in turn. At
the end no sample is lost or used twice, and on the repeatable engine the weights are a calm run's.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megatron_stare.config import load
from megatron_stare.records import Group
from tests.conftest import fill
from tests.paths import ROOT
from tests.rollout.sglang.proxy import Proxy
from tests.rollout.sglang.world import start_server, wait_for
from tests.slurm.cluster import SLOWNESS, Cluster, Job, Run
from tests.slurm.trial import Survived, Trial, script, trained_groups

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
SEED, EVERY = 7, 3
ALL_STEPS = ("run.record=all", "run.keep_last=3", "run.save_interval=1", "run.hang_timeout=30")


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A separate cluster, whose nodes see a disk of 400 MiB for the runs."""
    cluster = Cluster(tmp_path_factory.mktemp("trial"))
    disk = cluster.folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400m", "tmpfs", str(disk)], check=True)
    try:
        with cluster.running():
            yield cluster
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.fixture(scope="module")
def origin(field: Cluster) -> Path:
    """The configuration of a short run, whose first weights all trials begin with."""
    job, run = field.train("origin", "--nodes=1", "train.num_rollout=1")
    job.ended()
    return run.arm / "config.yaml"


def submitted(field: Cluster, origin: Path, name: str, nodes: int, *overrides: str) -> Job:
    words = (str(origin), "--load", "latest-good", f"run.dir={field.folder / 'disk' / name}")
    options = f"--nodes={nodes} --time=600 --signal=B:USR1@600"
    return field.submit(options, "train", *words, *ALL_STEPS, *overrides, **{SLOWNESS: "0.1"})


def started(field: Cluster, origin: Path, name: str, nodes: int, *overrides: str) -> Trial:
    run = Run(field.folder / "disk" / name, arm="")
    return Trial(field, run, lambda: submitted(field, origin, name, nodes, *overrides))


def preemption(trial: Trial) -> None:
    urgent = "--nodes=3 --partition=urgent --output=/dev/null --wrap=hostname"
    trial.cluster.call("sbatch", *urgent.split())


def time_limit(trial: Trial) -> None:
    hours, minutes, _ = (int(part) for part in trial.job["RunTime"].split(":"))
    number, before = f"JobId={trial.job.number}", trial.job["Restarts"]
    trial.cluster.call("scontrol", "update", number, f"TimeLimit={hours * 60 + minutes + 10}")
    trial.job.until(lambda: trial.job["Restarts"] != before)
    trial.cluster.call("scontrol", "update", number, "TimeLimit=600")


def lost_node(trial: Trial) -> None:
    victim, before = second_node(trial), trial.job["Restarts"]
    trial.cluster.program("kill-node", victim)
    trial.job.until(lambda: trial.job["Restarts"] != before)
    trial.cluster.program("start-node", victim)


def killed_rank(trial: Trial) -> None:
    trial.cluster.signal_rank(trial.job, 1, second_node(trial), "KILL")


def hung_rank(trial: Trial) -> None:
    trial.cluster.signal_rank(trial.job, 1, second_node(trial), "STOP")


def full_disk(trial: Trial) -> None:
    filler, step = fill(trial.cluster.folder / "disk", 256 << 10), len(trial.run.rows())
    trial.until_step(step + 1)
    filler.unlink()


def damaged_checkpoint(trial: Trial) -> None:
    trial.cluster.call("scancel", trial.job.number)
    trial.job.until(lambda: trial.job["JobState"] == "CANCELLED")
    newest = sorted((trial.run.directory / "checkpoints").glob("step_*"))[-1]
    largest = max(newest.rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])


FAULTS = {
    fault.__name__.replace("_", " "): fault
    for fault in (
        *(preemption, time_limit, lost_node, killed_rank, hung_rank, full_disk),
        damaged_checkpoint,
    )
}


def second_node(trial: Trial) -> str:
    """The node of the job on which its script does not run."""
    named = trial.cluster.call("scontrol", "show", "hostnames", trial.job["NodeList"])
    return next(node for node in named.split() if node != trial.job["BatchHost"])


def reported(survived: list[Survived]) -> list[str]:
    return [f"trial, seed {SEED}: {each}" for each in survived]


def exported(run: Path, target: Path) -> dict[str, bytes]:
    """The weight files of its last checkpoint, as Hugging Face has them."""
    command = ["convert", "megatron-to-hf", str(run), str(target)]
    subprocess.run([sys.executable, "-m", "megatron_stare", *command], cwd=ROOT, check=True)
    return {file.name: file.read_bytes() for file in target.glob("*.safetensors")}


def assert_all_are_used_once(steps: dict[int, list[Group]], prompts: int, samples: int) -> None:
    indices = [group.prompt.index for step in sorted(steps) for group in steps[step]]
    assert sorted(indices) == list(range(prompts)), "every prompt that was drawn is trained once"
    assert all(len(group.rollouts) == samples for step in steps.values() for group in step)


def test_after_every_fault_the_weights_equal_those_of_a_calm_run(field, origin, figures):
    events = script(SEED, sorted(FAULTS), 2, EVERY)
    steps = events[-1].step + EVERY
    more = (f"train.num_rollout={steps}", "rollout.dynamic_sampling=false")
    calm = started(field, origin, "calm", 2, *more)
    calm.run_through([], {}, steps)
    trial = started(field, origin, "stormy", 2, *more)
    figures += reported(trial.run_through(events, FAULTS, steps))
    assert trial.run.rows() == calm.run.rows()
    folders = [field.folder / name for name in ("calm_hf", "stormy_hf")]
    pairs = zip((calm, trial), folders, strict=True)
    one, other = (exported(each.run.directory, folder) for each, folder in pairs)
    assert one and one == other
    config = load(origin)
    samples, batch = config.rollout.n_samples_per_prompt, config.rollout.rollout_batch_size
    ours, theirs = trained_groups(trial.run.directory), trained_groups(calm.run.directory)
    assert_all_are_used_once(theirs, steps * batch, samples)
    # A full disk costs the record of a step, and the figures of it are the calm run's.
    assert len(ours) >= steps - 2
    assert all(groups == theirs[step] for step, groups in ours.items())


@pytest.mark.sglang
def test_through_every_fault_of_its_servers_no_sample_is_lost_or_used_twice(
    field, origin, figures, tmp_path
):
    model = Path(load(origin).policy.hf_checkpoint)
    with contextlib.ExitStack() as stack:
        servers = [start_server(model, tmp_path / f"server_{number}.txt") for number in range(2)]
        stack.callback(lambda: [server.stop() for server in servers])
        wait_for(servers, model, AutoTokenizer.from_pretrained(model))
        proxies = [stack.enter_context(contextlib.closing(Proxy(each.port))) for each in servers]

        def killed_server(trial: Trial) -> None:
            port = servers[0].port
            servers[0].stop(at_once=True)
            servers[0] = start_server(model, tmp_path / "server_0_again.txt", port)

        def slow_link(trial: Trial) -> None:
            proxies[1].delay = 2.0
            trial.until_step(len(trial.run.rows()) + 1)
            proxies[1].delay = 0.0

        def corrupt_sync(trial: Trial) -> None:
            proxies[0].faults["/update_weights_from_tensor"] = ["corrupt"]

        def broken_connections(trial: Trial) -> None:
            proxies[1].faults["/generate"] = ["reset", "garbage", 503, "reset"]

        faults = {
            fault.__name__.replace("_", " "): fault
            for fault in (killed_server, slow_link, corrupt_sync, broken_connections, preemption)
        }
        events = script(SEED, sorted(faults), 2, EVERY)
        steps = events[-1].step + EVERY
        more = (
            f"train.num_rollout={steps}",
            "rollout.dynamic_sampling=false",
            "rollout.engine=sglang",
            f"sglang.urls=[{','.join(proxy.url for proxy in proxies)}]",
            "sglang.sync_method=tensor",
            "sglang.health_interval=1",
        )
        trial = started(field, origin, "served", 1, *more)
        figures += reported(trial.run_through(events, faults, steps))
        assert not any(proxy.faults.get(path) for proxy in proxies for path in proxy.faults)
    rows = trial.run.rows()
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert max(row["engine_corrupt_syncs"] for row in rows) == 1
    config = load(trial.run.directory / "config.yaml")
    samples, batch = config.rollout.n_samples_per_prompt, config.rollout.rollout_batch_size
    assert_all_are_used_once(trained_groups(trial.run.directory), steps * batch, samples)
