"""slurm/library.sh without a container runtime and a GPU: the arguments of srun, recorded by a
substitute for srun.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_stare.__main__ import main
from tests.paths import ROOT

NODES = "a1 a2 a3 a4"
PROGRAMS = {
    # Two steps may start at the same moment.
    "srun": '{ flock 1; printf "%s\\0" "$@"; printf "\\n"; } >>"$RECORD"',
    "scontrol": 'if [ "$3" = HET1 ]; then echo b1; else tr " " "\\n" <<<"$NODES"; fi',
    "squeue": "echo RUNNING",
}
# The job's Python. `plan` and `doctor` import large libraries; their words are kept for
# `check_servers`, which gives them to the real commands.
PYTHON = f"""#!/bin/bash
case "$3" in
    plan|doctor) printf "%s\\0" "${{@:3}}" >>"$RECORD.asked" && printf "\\n" >>"$RECORD.asked" ;;
    *) exec {sys.executable} "$@" ;;
esac
"""
SCRIPTS = sorted((ROOT / "slurm").glob("*.s*"))


class JobFailed(Exception):
    """Exit code and stderr of a script."""


def steps(folder: Path, script: str, *arguments: str, **environment: str) -> list[list[str]]:
    """The words of each srun of a script."""
    programs, python = folder / "programs", folder / "own" / "bin" / "python"
    programs.mkdir()
    python.parent.mkdir(parents=True)
    for name, body in PROGRAMS.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (programs / name).chmod(0o755)
    python.write_text(PYTHON)
    python.chmod(0o755)
    job = {
        "VENV": str(folder / "own"),
        "PATH": f"{programs}:{os.environ['PATH']}",
        "RECORD": str(folder / "record"),
        "NODES": NODES,
        "LOGS": str(folder / "logs"),
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": "1234",
        "SLURM_JOB_NODELIST": "a[1-4]",
        "SLURM_CPUS_ON_NODE": "96",
        "SLURM_GPUS_ON_NODE": "8",
    }
    done = subprocess.run(
        ["bash", str(ROOT / "slurm" / script), *arguments],
        env=job | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    (folder / "stderr").write_text(done.stderr)
    if done.returncode:
        raise JobFailed(done.returncode, done.stderr)
    if (asked := folder / "record.asked").exists():
        check_servers(words_of(asked))
    return words_of(folder / "record")


def words_of(record: Path) -> list[list[str]]:
    return [line.rstrip("\0").split("\0") for line in record.read_text().splitlines()]


def check_servers(asked: list[list[str]]) -> None:
    """The real commands, in this process, take the words, and find no fault of the servers that
    the script has started.
    """
    for words in asked:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = main(words)
        if words[0] == "plan":
            assert code == 0 or "a server of" not in said.getvalue()
        else:  # it also reports faults of this machine
            assert code in (0, 1), said.getvalue()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_every_script_is_bash(script):
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True).returncode == 0


def test_pyxis_gets_the_image_and_every_mount_twice(tmp_path):
    found = steps(
        tmp_path,
        "train.sbatch",
        "short_cot_7b",
        "run.dir=/runs/a b",
        CONTAINER="pyxis:nvcr.io#nvidia/pytorch:25.08",
        MOUNTS="/models,/runs",
        VENV="",
    )
    health, train = found
    assert "--container-image=nvcr.io#nvidia/pytorch:25.08" in train
    assert "--container-mounts=/models:/models,/runs:/runs" in train
    assert "--nodelist=a1,a2,a3,a4" in train and "--nodes=4" in train
    assert "--cpus-per-task=96" in train
    assert train[-4:] == [f"{ROOT}/slurm/node.sh", "train", "short_cot_7b", "run.dir=/runs/a b"]
    # The check runs in the job's container; both steps share one that is unpacked once.
    (name,) = [word for word in train if word.startswith("--container-name=")]
    assert name in health and "--container-image=nvcr.io#nvidia/pytorch:25.08" in health


def test_servers_may_have_an_image_of_their_own(tmp_path):
    images = {"CONTAINER": "pyxis:/images/a.sqsh", "SERVER_CONTAINER": "apptainer:/images/b.sif"}
    images |= {"ROLLOUT_NODES": "2", "GPUS_PER_SERVER": "4"}
    found = steps(tmp_path, "train.sbatch", "short_cot_7b", **images)
    (serve,) = [step for step in found if f"{ROOT}/slurm/server.sh" in step]
    assert "/images/b.sif" in serve and "--container-image=/images/a.sqsh" not in serve
    checks = [step for step in found if f"{ROOT}/slurm/health_check.sh" in step]
    assert "--container-image=/images/a.sqsh" in checks[0] and "/images/b.sif" in checks[1]


def test_colocated_servers_run_on_every_trainer_node_and_see_its_gpus(tmp_path):
    settings = {"COLOCATED": "1", "GPUS_PER_SERVER": "4"}
    found = steps(tmp_path, "train.sbatch", "short_cot_7b", "run.dir=/runs/a", **settings)
    (train,) = [step for step in found if step[-1].startswith("sglang.urls=")]
    (serve,) = [step for step in found if f"{ROOT}/slurm/server.sh" in step]
    assert "--nodelist=a1,a2,a3,a4" in train and "--nodelist=a1,a2,a3,a4" in serve
    assert "--overlap" in serve and "--ntasks=8" in serve
    assert not [word for word in serve if word.startswith("--gpus-per-task")]
    for step in (train, serve):
        words = step[step.index("short_cot_7b") :]
        assert words[1:3] == ["sglang.colocated=true", "sglang.sync_method=tensor"]
    assert train[-1].count("http") == 8 and train[-1].count("a4:") == 2


def test_colocated_servers_take_the_gpus_of_their_place_on_the_node(tmp_path):
    """server.sh itself, with a Python that prints what it is asked to serve."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/usr/bin/env bash\necho "$@"\nexit 2\n')
    python.chmod(0o755)
    task = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SERVER_PORT": "30000"}
    job = {"SERVER_NODES": "a1 a2", "NODES_PER_SERVER": "1", "GPUS_PER_SERVER": "4"}
    for colocated, first in (("1", 4), ("0", 0)):
        more = {"COLOCATED": colocated, "LOGS": str(tmp_path), "VENV": str(tmp_path)}
        more |= {"PATH": os.environ["PATH"], "MEGATRON_STARE": str(ROOT)}
        script = ["bash", str(ROOT / "slurm/server.sh"), "short_cot_7b"]
        subprocess.run(script, env=task | job | more, timeout=60, capture_output=True)
        assert f"sglang.first_gpu={first} " in (tmp_path / "server_00005.log").read_text()
        (tmp_path / "server_00005.log").unlink()


def test_colocated_servers_need_no_nodes_of_their_own(tmp_path):
    with pytest.raises(JobFailed) as failed:
        steps(tmp_path, "train.sbatch", "short_cot_7b", COLOCATED="1", ROLLOUT_NODES="2")
    assert failed.value.args[0] == 2 and "unset ROLLOUT_NODES" in failed.value.args[1]


def test_apptainer_stands_before_the_command(tmp_path):
    image = {"CONTAINER": "apptainer:/images/stare.sif", "MOUNTS": "/models,/runs", "VENV": ""}
    *_, train = steps(tmp_path, "evaluate.sbatch", "/runs/math", **image)
    start = train.index("apptainer")
    inside = ["exec", "--bind", "/models,/runs", "--nv", "/images/stare.sif", "bash"]
    assert train[start + 1 : start + 7] == inside
    assert train[start + 7 :] == [f"{ROOT}/slurm/node.sh", "evaluate", "/runs/math"]


def test_mounts_are_split_at_commas_alone(tmp_path):
    """A blank belongs to a name, and a star is not a pattern."""
    places = "/data/my models,/work/*,/runs"
    for image, wanted in (
        ("apptainer:/images/stare.sif", places),
        (
            "pyxis:image",
            "--container-mounts=/data/my models:/data/my models,/work/*:/work/*,/runs:/runs",
        ),
    ):
        folder = tmp_path / image.partition(":")[0]
        folder.mkdir()
        *_, train = steps(folder, "evaluate.sbatch", "/runs/math", CONTAINER=image, MOUNTS=places)
        assert wanted in train


def test_servers_are_tasks_of_their_own_nodes_with_gpus_of_their_own(tmp_path):
    rollouts = {"ROLLOUT_NODES": "2", "GPUS_PER_SERVER": "4"}
    options = ("--load", "latest-good", "--force")  # not the servers'
    found = steps(tmp_path, "train.sbatch", "short_cot_7b", *options, "run.dir=/runs/a", **rollouts)
    (train,) = [step for step in found if step[-1].startswith("sglang.urls=")]
    (serve,) = [step for step in found if f"{ROOT}/slurm/server.sh" in step]
    assert "--nodelist=a1,a2" in train and "--nodelist=a3,a4" in serve
    assert "--ntasks=4" in serve and "--ntasks-per-node=2" in serve and "--gpus-per-task=4" in serve
    assert "--load" not in serve and "run.dir=/runs/a" in serve
    assert [word for word in train if word in (*options, "run.dir=/runs/a")] == [
        *options,
        "run.dir=/runs/a",
    ]
    first = 30000 + 1234 % 100 * 16
    urls = [f"http://{node}:{first + number}" for node in ("a3", "a4") for number in (0, 1)]
    assert train[-2:] == ["rollout.engine=sglang", f"sglang.urls=[{','.join(urls)}]"]
    assert train[-3] == "sglang.gpus_per_server=4", "by which the trainer plans its servers"


def test_servers_of_an_earlier_job_are_not_waited_for(tmp_path):
    """A run's config.yaml names them. Those that answer, or that a setting names, are used."""
    run = tmp_path / "run"
    run.mkdir()
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        own = f"http://127.0.0.1:{port.getsockname()[1]}"
        lines = ["rollout:\n  engine: sglang\nsglang:\n  urls:\n"]
        lines += [f"  - {url}\n" for url in ("http://127.0.0.1:9", own)]
        (run / "config.yaml").write_text("".join(lines))
        for name, words in (
            ("lost", ()),
            ("given", ("sglang.urls=[http://node:30000]",)),
            ("embedded", ("rollout.engine=embedded",)),
        ):
            folder = tmp_path / name
            folder.mkdir()
            if words:
                *_, found = steps(folder, "evaluate.sbatch", str(run), *words)
                assert found[-2:] == [str(run), *words]
                continue
            with pytest.raises(JobFailed) as failed:
                steps(folder, "evaluate.sbatch", str(run))
            code, stderr = failed.value.args
            assert code == 2 and f"no server of sglang.urls in {run}/config.yaml" in stderr
        port.listen()
        folder = tmp_path / "alive"
        folder.mkdir()
        *_, found = steps(folder, "evaluate.sbatch", str(run))
        assert found[-1] == str(run)


def test_the_size_of_a_server_comes_from_the_recipe_or_the_run(tmp_path):
    """One of eight GPUs by the recipe, of four by an override; never a default of the scripts."""
    for name, overrides, each in (("recipe", (), 8), ("run", ("sglang.gpus_per_server=4",), 4)):
        folder = tmp_path / name
        folder.mkdir()
        found = steps(folder, "train.sbatch", "long_cot_32b", *overrides, ROLLOUT_NODES="2")
        (serve,) = [step for step in found if f"{ROOT}/slurm/server.sh" in step]
        assert f"--gpus-per-task={each}" in serve and f"--ntasks={2 * 8 // each}" in serve
        (train,) = [step for step in found if step[-1].startswith("sglang.urls=")]
        for step in (train, serve):  # the recipe is for shared GPUs, this job has others
            words = step[step.index("long_cot_32b") :]
            assert words[1:3] == ["sglang.colocated=false", "sglang.sync_method=broadcast"]


@pytest.mark.parametrize(
    ("size", "message"),
    [("1", "a server of 1 GPUs has 61.0 GiB of weights"), ("3", "does not divide the 8 GPUs")],
)
def test_servers_that_cannot_work_end_the_job_before_any_starts(size, message, tmp_path):
    two_nodes = "policy.context_parallel_size=2"  # what is left of four nodes to train on
    rollouts = {"ROLLOUT_NODES": "2", "GPUS_PER_SERVER": size, "VENV": str(ROOT / ".venv")}
    with pytest.raises(JobFailed) as failed:
        steps(tmp_path, "train.sbatch", "long_cot_32b", two_nodes, **rollouts)
    code, stderr = failed.value.args
    assert code == 2 and message in stderr
    assert "server.sh" not in (tmp_path / "record").read_text()


@pytest.mark.parametrize(("colocated", "says"), [("0", True), ("1", False)])
def test_two_versions_of_nccl_are_named_before_servers_start(colocated, says, tmp_path):
    """As `doctor` finds them with the job's Python, a substitute here."""
    answers = {
        "config": "sglang.gpus_per_server=4  # a recipe's",
        "doctor": "WARN servers' NCCL: 2.30.7, the trainer's is 2.28.9",
    }
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    cases = "\n".join(f"    {name}) echo {text!r} ;;" for name, text in answers.items())
    python.write_text(f'#!/bin/bash\ncase "$3" in\n{cases}\nesac\n')
    python.chmod(0o755)
    where = {"COLOCATED": "1"} if colocated == "1" else {"ROLLOUT_NODES": "2"}
    steps(tmp_path, "train.sbatch", "run.yaml", VENV=str(tmp_path / "venv"), **where)
    assert ("the trainer's is 2.28.9" in (tmp_path / "stderr").read_text()) == says


def test_a_heterogeneous_job_serves_on_its_second_component(tmp_path):
    both = {"SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "a[1-4]"}
    both |= {"SLURM_JOB_NODELIST_HET_GROUP_1": "HET1", "SLURM_HET_JOB_ID": "1234"}
    found = steps(tmp_path, "train.sbatch", "short_cot_7b", **both)
    (train,) = [step for step in found if step[-1].startswith("sglang.urls=")]
    (serve,) = [step for step in found if f"{ROOT}/slurm/server.sh" in step]
    assert "--het-group=0" in train and "--het-group=1" in serve
    assert "http://b1:" in train[-1] and train[-1].count("http") == 8


RANK = r"""#!/bin/bash
echo "$@"
env | grep -e ^CUDA_DEVICE_MAX_CONNECTIONS -e ^TRITON_CACHE_DIR || true
"""


def test_a_rank_has_its_own_cores_and_its_nodes_disk(tmp_path):
    """Ranks are bound to the cores next to their GPUs, and kernels are compiled on the node."""
    programs = tmp_path / "venv" / "bin"
    programs.mkdir(parents=True)
    for name, text in (("python", RANK), ("numactl", "#!/bin/bash")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    job = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "VENV": str(tmp_path / "venv"),
        "LOGS": str(tmp_path),
        "MEGATRON_STARE": str(ROOT),
        "SLURM_NODEID": "0",
        "SLURMD_NODENAME": "a1",
        "RANK": "3",
        "GPUS_PER_NODE": "8",
        "TMPDIR": "/local",
    }
    words = {
        "TRAINER_NODES": "2",
        "PROCESSES_PER_NODE": "8",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }
    for script in ("node.sh", "rank.sh"):
        command = ["bash", str(ROOT / "slurm" / script), "train", "x"]
        done = subprocess.run(command, env=job | words, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        if script == "node.sh":
            assert "--numa-binding=node" in done.stdout
    said = (tmp_path / "rank_00003.log").read_text()
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in said and "TRITON_CACHE_DIR=/local/triton_" in said


SAVING = """
import os, signal, sys, time
ended = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda *_: ended.append(1))
print("training", flush=True)
while not ended:
    time.sleep(0.05)
time.sleep(1)  # for the other processes that the signal ends
print("the last step", file=sys.stderr, flush=True)
open(os.environ["LOGS"] + "/saved", "w").close()
"""
AGENT = """#!/bin/bash
case $2 in
    torch.distributed.run) RANK=0 exec bash "$MEGATRON_STARE/slurm/rank.sh" train x ;;
    *) exec PYTHON PROGRAM ;;
esac
"""


@pytest.mark.parametrize(
    ("script", "to_all", "code"), [("rank.sh", True, 0), ("node.sh", False, 75)]
)
def test_a_rank_saves_on_sigterm(script, to_all, code, tmp_path):
    """torchrun also signals tee, which the first rank's output goes through. Slurm's
    proctrack/cgroup signals only the step's own process.
    """
    program, python = tmp_path / "saving.py", tmp_path / "bin" / "python"
    program.write_text(SAVING)
    python.parent.mkdir()
    python.write_text(AGENT.replace("PYTHON", sys.executable).replace("PROGRAM", str(program)))
    python.chmod(0o755)
    job = {"PATH": os.environ["PATH"], "VENV": str(tmp_path), "LOGS": str(tmp_path), "RANK": "0"}
    job |= {"MEGATRON_STARE": str(ROOT), "SLURMD_NODENAME": "a1", "SLURM_NODEID": "0"}
    job |= {"TRAINER_NODES": "1", "PROCESSES_PER_NODE": "1", "AGAIN": "75"}
    job |= {"MASTER_ADDR": "a1", "MASTER_PORT": "1"}
    (tmp_path / "pids").mkdir()
    step = subprocess.Popen(
        ["bash", str(ROOT / "slurm" / script), "train", "x"],
        env=job,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert step.stdout is not None and step.stdout.readline() == "training\n"
    (os.killpg if to_all else os.kill)(step.pid, signal.SIGTERM)
    try:
        said, _ = step.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(step.pid, signal.SIGKILL)
    assert step.returncode == code and "the last step" in said and (tmp_path / "saved").exists()


def test_no_step_starts_mpi(tmp_path):
    found = steps(tmp_path, "train.sbatch", "quickstart")
    assert found and all("--mpi=none" in step for step in found)
