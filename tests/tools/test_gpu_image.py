"""The Dockerfile's RUN lines that need no CUDA base, executed in a scratch root."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.tools.test_gpu_build import instructions

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("debootstrap"),
        reason="needs root and debootstrap (Debian: apt-get install debootstrap)",
    ),
]

# They compile for CUDA, or install and import packages that need its driver.
WITH_CUDA = ("make gpu", "make sglang-gpu")
# Debian has no Python 3.12, so that this machine's is mounted, and headers are those of Debian's.
ON_DEBIAN = {"python3.12-dev": "python3-dev", "python3.12-venv": "python3-venv"}
PYTHON = Path(sys.base_prefix).resolve()
# Of this machine, where pip and apt-get find packages and certificates.
SETTINGS = (
    *("/etc/resolv.conf", "/etc/apt/apt.conf.d", "/etc/pip.conf", "/etc/xdg/pip"),
    "/usr/local/share/ca-certificates",
)
# Read-only, because packages that are installed in the root must change nothing outside of it.
MOUNTED = """
set -eu
mount --bind /proc "$1/proc"
mount --rbind /dev "$1/dev"
for folder in "${@:3}"; do
    mkdir -p "$1$folder"
    mount --bind "$folder" "$1$folder"
    mount -o remount,bind,ro "$1$folder"
done
exec chroot "$1" /bin/bash -euo pipefail -c "$2"
"""


def run(root: Path, command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command in the root, with this machine's Python 3.12."""
    # Settings of pip may name folders of packages under /opt.
    folders = [str(each) for each in (PYTHON, *Path("/opt").iterdir()) if each.is_dir()]
    isolated = ["unshare", "--mount", "--pid", "--fork", "bash", "-c", MOUNTED, "run"]
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    path = f"{PYTHON}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return subprocess.run(
        [*isolated, str(root), command, *folders],
        env=kept
        | {"PATH": path, "HOME": "/root", "DEBIAN_FRONTEND": "noninteractive"}
        | environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A minimal Debian of this machine's release."""
    place = tmp_path_factory.mktemp("image")
    release = platform.freedesktop_os_release()["VERSION_CODENAME"]
    subprocess.run(["debootstrap", "--variant=minbase", release, place], check=True)
    for each in map(Path, SETTINGS):
        target = place / each.relative_to("/")
        if each.is_dir():
            shutil.copytree(each, target, dirs_exist_ok=True)
        elif each.is_file():
            shutil.copy(each, target)
    (place / "etc/dpkg/dpkg.cfg.d/unsafe-io").write_text("force-unsafe-io\n")  # as in Docker
    yield place
    shutil.rmtree(place)  # gigabytes


def test_run_lines_without_cuda_succeed_in_a_scratch_root(root: Path) -> None:
    place, environment, ran = "/", dict[str, str](), []
    for kind, value in instructions():
        if kind == "WORKDIR":
            place = value
            (root / place.lstrip("/")).mkdir(parents=True)
        elif kind == "ENV":
            pairs = (word.split("=", 1) for word in value.split())
            environment |= {name: text for name, text in pairs if "$" not in text}
        elif kind == "COPY":
            assert value == ". ."
            archive = ["git", "-C", ROOT, "archive", "HEAD"]  # what is tracked, as in a clone
            packed = subprocess.run(archive, check=True, stdout=subprocess.PIPE).stdout
            unpack = ["tar", "--extract", "--directory", root / place.lstrip("/")]
            subprocess.run(unpack, input=packed, check=True)
        elif kind == "RUN" and not value.startswith(WITH_CUDA):
            for theirs, debians in ON_DEBIAN.items():
                value = value.replace(theirs, debians)
            done = run(root, f"cd {place} && {value}", **environment)
            assert done.returncode == 0, (value, done.stdout[-3000:], done.stderr[-3000:])
            ran.append(value.split()[:2])
    assert ran == [["apt-get", "update"], ["make", "setup"]]
    doctor = run(root, f"cd {place} && .venv/bin/python -m megatron_stare doctor")
    assert doctor.returncode == 0 and " 0 FAIL" in doctor.stdout, doctor.stdout + doctor.stderr
    programs = run(root, "bwrap --version && numactl --hardware && command -v ibstat ninja git g++")
    assert programs.returncode == 0, programs.stdout + programs.stderr
