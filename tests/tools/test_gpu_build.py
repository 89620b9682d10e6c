"""tools/gpu and the Dockerfile without a GPU: their pins agree with each other and with what the
installed torch names, the build passes the right settings to pip, and every line is valid.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megatron_stare.debug.doctor import TESTED_SGLANG
from tests.paths import ROOT

BUILD = ROOT / "tools/gpu/build"
SCRIPTS = [BUILD, *sorted((ROOT / "slurm").glob("*.s*h")), *sorted((ROOT / "slurm").glob("*.sb*"))]
RECORDER = """#!/usr/bin/env bash
echo "$* | $CPATH | ${MAX_JOBS:-} | ${NVTE_BUILD_USE_NVIDIA_WHEELS:-}" >>"$RECORD"
case "$*" in
    *purelib*) echo /site ;;
    *torch.__version__*-py*) echo torch2-py312 ;;
    *" wheel "*) mkdir -p "$WHEELS" && touch "$WHEELS/transformer_engine_torch-$VERSION-a.whl" ;;
    *"import torch, transformer_engine"*) exit "${IMPORTS:-0}" ;;
esac
"""


def pins(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def of_torch() -> dict[str, str]:
    """The versions that the installed torch names."""
    named = [Requirement(line) for line in metadata.requires("torch") or []]
    return {each.name: str(each.specifier).removeprefix("==") for each in named}


def test_trainer_and_servers_have_one_nccl_not_older_than_torchs() -> None:
    ours, theirs = (pins(f"tools/gpu/{side}.txt") for side in ("trainer", "server"))
    assert ours["nvidia-nccl-cu13"] == theirs["nvidia-nccl-cu13"]
    numbers = [
        tuple(map(int, version.split(".")))
        for version in (ours["nvidia-nccl-cu13"], of_torch()["nvidia-nccl-cu13"])
    ]
    assert numbers[0] >= numbers[1] and numbers[0][0] == numbers[1][0]
    assert theirs["sglang"] == TESTED_SGLANG


def test_headers_are_those_of_torchs_cuda_and_the_null_devices() -> None:
    trainer, null = pins("tools/gpu/trainer.txt"), pins("tools/nullcuda/requirements.txt")
    assert null.items() <= trainer.items()
    cuda = re.match(r"\d+\.\d+", metadata.version("nvidia-cuda-runtime"))
    assert cuda
    for name in ("nvidia-cuda-crt", "nvidia-cuda-cccl"):
        assert trainer[name].startswith(f"{cuda[0]}."), name


def built(folder: Path, **settings: str) -> tuple[int, list[str]]:
    """Exit code, and what the environment's Python was asked: arguments | CPATH | jobs | wheels."""
    copy = folder / "tools/gpu"
    copy.mkdir(parents=True, exist_ok=True)
    for file in ("build", "trainer.txt", "server.txt"):
        (copy / file).write_bytes((BUILD.parent / file).read_bytes())
    python = folder / ".venv/bin/python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(RECORDER)
    python.chmod(0o755)
    version = pins("tools/gpu/trainer.txt")["transformer_engine"]
    known = {"RECORD": f"{folder}/record", "WHEELS": f"{folder}/.gpu-wheels/torch2-py312"}
    known |= {"VERSION": version, "PATH": os.environ["PATH"]}
    done = subprocess.run(
        ["bash", str(copy / "build"), "trainer"],
        env=known | settings,
        capture_output=True,
        text=True,
        timeout=60,
    )
    asked = (folder / "record").read_text().splitlines()
    (folder / "record").unlink()
    return done.returncode, asked


def test_the_bindings_are_compiled_once_with_the_headers_of_wheels(tmp_path: Path) -> None:
    code, asked = built(tmp_path, MAX_JOBS="3")
    assert code == 0
    (wheel,) = [line for line in asked if " wheel " in line]
    command, path, jobs, from_wheels = (part.strip() for part in wheel.split("|"))
    assert command.endswith(f"torch=={pins('tools/gpu/trainer.txt')['transformer_engine']}")
    assert "--no-build-isolation" in command and (jobs, from_wheels) == ("3", "1")
    assert "/site/nvidia/cu13/include/cccl" in path.split(":")
    assert "import torch, transformer_engine.pytorch" in "".join(asked[asked.index(wheel) :])
    _, again = built(tmp_path)
    assert not [line for line in again if " wheel " in line]


def test_a_build_that_cannot_be_imported_fails(tmp_path: Path) -> None:
    assert built(tmp_path, IMPORTS="1")[0] == 1


def test_apex_without_a_compiler_is_refused(tmp_path: Path) -> None:
    assert built(tmp_path, APEX="/src/apex", PATH="/usr/bin:/bin")[0] == 2


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_have_no_shell_faults(script: Path) -> None:
    lint = ROOT / ".venv/bin/shellcheck"
    done = subprocess.run([lint, "-S", "warning", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def instructions() -> list[tuple[str, str]]:
    text = (ROOT / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined]


def test_the_image_is_linted_and_each_command_is_valid() -> None:
    done = subprocess.run(
        [ROOT / ".venv/bin/hadolint", ROOT / "Dockerfile"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for kind, command in instructions():
        if kind != "RUN":
            continue
        syntax = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True)
        assert syntax.returncode == 0, syntax.stderr
        words = shlex.split(command)
        assert words[0] != "make" or words[1] in targets


def test_the_image_has_cuda_both_environments_and_what_slurm_jobs_need() -> None:
    found = instructions()
    assert re.match(r"nvidia/cuda:13\.\d+\.\d+-devel-", dict(found)["FROM"])
    commands = " ".join(command for kind, command in found if kind == "RUN")
    for word in ("make gpu", "make sglang-gpu", "bubblewrap", "rdma-core", "python3.12-dev"):
        assert word in commands, word
    settings = " ".join(value for kind, value in found if kind == "ENV")
    assert "SGLANG_PYTHON=/opt/megatron_stare/.venv-sglang-gpu/bin/python" in settings
    assert "enroot import" in (ROOT / "Dockerfile").read_text()
