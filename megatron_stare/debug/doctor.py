"""`doctor`: checks whether this machine is ready for a run. A finding is OK, WARN or FAIL, and one
that is not OK names its remedy.

With `--cluster`, under torchrun or srun, every rank checks its own node, and the ranks compare
their clocks, versions and bandwidth (debug/cluster.py). Functions import torch themselves, so
that the command starts fast; without a GPU it needs no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import math
import platform
import resource
import runpy
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal, get_args

from packaging.requirements import Requirement

from megatron_stare.config import Config, UserError
from megatron_stare.rollout.sglang.access import api_key
from megatron_stare.system import unseen_gpus

Level = Literal["OK", "WARN", "FAIL"]
TESTED_SGLANG = "0.5.23"
PINNED = Path(__file__).parents[2] / "requirements.txt"
GIB = 2**30
LEAST_SHARED, ENOUGH_SHARED = GIB // 4, 16 * GIB  # of /dev/shm: without and with GPUs
ENOUGH_FILES = 65536
FIRST_CUDNN = 91800  # without NaN on Hopper
SGLANG_GLIBC = (2, 34)  # of its wheel
ENOUGH_DISK = 10 * GIB


@dataclass(frozen=True)
class Finding:
    """The result of one check. `remedy` is empty where the user has nothing to do."""

    level: Level
    what: str
    found: str
    remedy: str = ""

    def line(self) -> str:
        """The finding as the command prints it."""
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.level:5}{self.what}: {self.found}{remedy}"


def judged(right: bool, what: str, found: str, remedy: str, otherwise: Level = "WARN") -> Finding:
    """OK if it is right; else the other level, with the remedy."""
    return Finding("OK", what, found) if right else Finding(otherwise, what, found, remedy)


def examine(config: Config) -> Iterator[Finding]:
    """Check this machine for a run of `config`. Each finding is yielded as soon as it is known."""
    for look in (_packages, _optional, _gpus, servers, disk, _shared_memory, _limits):
        yield from look(config)


def print_findings(findings: Iterable[Finding]) -> int:
    """Print one line per finding as soon as it is known, then a count per level. The returned exit
    code is 1 if any finding is FAIL.
    """
    levels: Counter[Level] = Counter()
    for finding in findings:
        print(finding.line(), flush=True)
        levels[finding.level] += 1
    if levels:
        print(", ".join(f"{levels[each]} {each}" for each in get_args(Level)))
    return int(levels["FAIL"] > 0)


def _packages(config: Config) -> Iterator[Finding]:
    """Compare Python and the required packages with the supported and the tested versions."""
    version = platform.python_version()
    yield judged(sys.version_info >= (3, 12), "python", version, "use 3.12 or newer", "FAIL")
    tested = pinned_versions()
    try:
        required = metadata.requires("megatron-stare") or []
    except metadata.PackageNotFoundError:
        remedy = "pip install -e . in its directory"
        yield Finding("FAIL", "megatron-stare", "not installed", remedy)
        return
    for line in required:
        requirement = Requirement(line)
        if requirement.marker is None:
            yield _package(requirement, tested.get(requirement.name, ""))


def _package(requirement: Requirement, tested: str) -> Finding:
    name = requirement.name
    install = f"pip install '{name}{requirement.specifier}'"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding("FAIL", name, "not installed", install)
    if not requirement.specifier.contains(version, prereleases=True):
        return Finding("FAIL", name, f"{version}, outside {requirement.specifier}", install)
    same = not tested or version.partition("+")[0] == tested
    return judged(same, name, version, f"{tested} is what the tests run")


def pinned_versions() -> dict[str, str]:
    """Package name -> tested version, from requirements.txt. An installation without that file
    gives an empty table.
    """
    if not PINNED.is_file():
        return {}
    lines = (line.partition("#")[0].strip() for line in PINNED.read_text().splitlines())
    return {name: version for name, _, version in (line.partition("==") for line in lines) if name}


def _optional(config: Config) -> Iterator[Finding]:
    """Check packages that only some runs need. Those that this machine needs are imported, because
    an installed package can still be broken.
    """
    gpu = on_gpu()
    if gpu:
        from megatron_stare.policy.runtime import load_torchs_cudnn

        load_torchs_cudnn()
    remedy = "`make gpu`; without it layers are slower and policy.fp8 is refused"
    module = "transformer_engine.pytorch"
    yield _importable("TransformerEngine", module, "transformer-engine", gpu, remedy)
    if gpu and _wants_delta_kernels(config):
        name = "flash-linear-attention"
        remedy = (
            "pip install flash-linear-attention; without its kernels gated delta nets are slow and "
            "keep three times the memory"
        )
        yield _importable(name, "fla.ops.gated_delta_rule", name, True, remedy)
    if importlib.util.find_spec("apex") and not importlib.util.find_spec("amp_C"):
        found = "the package of that name on the index, which is another project"
        remedy = "NVIDIA's is built from source, and TransformerEngine needs none"
        yield Finding("WARN", "apex", found, f"pip uninstall apex; {remedy}")
    else:
        has = "there" if importlib.util.find_spec("apex") else "not there, and not needed"
        yield Finding("OK", "apex", has)
    yield _importable("modelopt", "modelopt", "nvidia-modelopt", False)


def _wants_delta_kernels(config: Config) -> bool:
    """Whether the model has gated delta nets whose kernels this run may use."""
    if config.policy.deterministic or not config.policy.hf_checkpoint:
        return False
    from megatron_stare.planning.shapes import model_shape
    from megatron_stare.policy.huggingface.families import has_delta_nets

    with contextlib.suppress(UserError):
        return has_delta_nets(model_shape(config.policy.hf_checkpoint))
    return False


def on_gpu() -> bool:
    """Whether torch sees a GPU. torch is imported only if the driver's library is there."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    import torch

    return torch.cuda.is_available()


def _built_for() -> str:
    """The CUDA version that torch was built for. It is read from torch's version.py, which imports
    nothing.
    """
    torch = importlib.util.find_spec("torch")
    if torch is None or not torch.origin:
        return "none"
    return runpy.run_path(str(Path(torch.origin).with_name("version.py"))).get("cuda") or "none"


def _importable(what: str, module: str, project: str, wanted: bool, remedy: str = "") -> Finding:
    """WARN for a wanted package that is absent or broken. A package that is not wanted is not
    imported. `project`: its name on the package index.
    """
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        if wanted:
            return Finding("WARN", what, "not installed", remedy)
        return Finding("OK", what, "not installed, and not needed here")
    if wanted:
        try:
            importlib.import_module(module)
        except Exception as error:  # a broken build may raise anything
            lines = str(error).splitlines() or [type(error).__name__]
            return Finding("WARN", what, f"cannot be imported ({lines[0]})", remedy)
    with contextlib.suppress(metadata.PackageNotFoundError):
        return Finding("OK", what, metadata.version(project))
    return Finding("OK", what, "there")


def _gpus(config: Config) -> Iterator[Finding]:
    if not on_gpu():
        built = _built_for()
        if fault := unseen_gpus(None if built == "none" else built):
            found, _, remedy = fault.partition("; ")
            yield Finding("FAIL", "CUDA", found, remedy)
        else:
            found = f"no GPU is seen (torch was built for CUDA {built})"
            remedy = "fine for a quickstart; GPUs need their driver (docs/install.md)"
            yield Finding("WARN", "CUDA", found, remedy)
        return
    import torch

    count = torch.cuda.device_count()
    names = {torch.cuda.get_device_name(number) for number in range(count)}
    # A look takes memory there: the ranks of a node would find each other's on the first GPU.
    own = [torch.cuda.current_device()] if torch.distributed.is_initialized() else range(count)
    (free, total), gpu = min((torch.cuda.mem_get_info(each), each) for each in own)
    yield Finding("OK", "CUDA", f"{torch.version.cuda}, {count} x {', '.join(names)}")
    found = f"GPU {gpu}: {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    remedy = "end the processes that nvidia-smi shows"
    yield judged(free > 0.95 * total, "GPU memory", found, remedy)
    major, minor = torch.cuda.get_device_capability(0)
    if major < 8:
        yield Finding("FAIL", "GPU", f"compute capability {major}", "bf16 needs 8.0 or newer")
    flash = importlib.util.find_spec("flash_attn") is not None
    try:
        version = torch.backends.cudnn.version() or 0
    except RuntimeError as error:  # another cuDNN is loaded in this process
        said = str(error).splitlines()[0]
        remedy = "remove the other cuDNN from LD_LIBRARY_PATH and CUDNN_HOME"
        yield Finding("FAIL", "cuDNN", said, remedy)
    else:
        yield cudnn_finding(version, (major, minor), flash)
    yield Finding("OK", "NCCL", ".".join(map(str, torch.cuda.nccl.version())))


def cudnn_finding(version: int, capability: tuple[int, int], flash_attention: bool) -> Finding:
    """Check that packed sequences have a backward pass without NaN: cuDNN before 9.18 does not
    initialise a workspace of it on Hopper (TransformerEngine's issue 2186). Nothing calls cuDNN
    where flash-attn is installed. `version` is torch's number, e.g. 91900 for 9.19.0.
    """
    name = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    if version >= FIRST_CUDNN or capability != (9, 0) or flash_attention:
        return Finding("OK", "cuDNN", name)
    remedy = "install torch 2.11 or newer, or nvidia-cudnn-cu13 9.18 or newer"
    return Finding("FAIL", "cuDNN", f"{name}: NaN in the backward of packed attention", remedy)


def servers(config: Config) -> Iterator[Finding]:
    """Check the SGLang servers of the run: their version from running servers, otherwise from the
    Python environment that would launch them.
    """
    if config.rollout.engine != "sglang":
        yield Finding("OK", "SGLang", "not needed: rollout.engine=embedded")
        return
    from megatron_stare.http_client import FAULTS, request
    from megatron_stare.rollout.sglang.process import own_nccl_version, servers_nccl

    key = api_key(config.sglang)
    for url in config.sglang.urls:
        try:
            status, answer = request("GET", f"{url.rstrip('/')}/server_info", key, timeout=10.0)
            if status != 200:
                raise ValueError(f"status {status}")
            said = json.loads(answer)
            yield _sglang(url, str(said.get("version", "unknown")))
            yield from _format(url, str(said.get("model_path", "")), config)
        except (*FAULTS, ValueError) as error:
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            yield Finding("FAIL", url, said, "start it, or correct sglang.urls and sglang.api_key")
    if not config.sglang.urls:
        yield from _launched(config)
    elif on_gpu() and config.sglang.transport == "broadcast":
        yield nccl_finding(own_nccl_version(), servers_nccl(config.sglang))
    if config.sglang.sync_method == "delta":
        yield from (_relay(url, key) for url in config.sglang.relays)


def _format(url: str, model_path: str, config: Config) -> Iterator[Finding]:
    """Whether a running server holds weights in the format that it is sent, as far as its
    config.json can be read from here.
    """
    from megatron_stare.loop.resolve import load_tokenizer
    from megatron_stare.rollout.sglang.server import check_format, read_config
    from megatron_stare.sync.served_engine import served_model

    checkpoint = Path(config.policy.hf_checkpoint or "none") / "config.json"
    if not checkpoint.is_file() or not (Path(model_path) / "config.json").is_file():
        return
    try:
        model = served_model(config, load_tokenizer(config.policy.hf_checkpoint))
        check_format(url, read_config(model_path), model)
    except UserError as error:
        yield Finding("FAIL", url, str(error), "start it so, or change sglang.weights")


def _relay(url: str, key: str) -> Finding:
    from megatron_stare.sync.delta.transport import RelayFault, RelayLink

    link = RelayLink(url, key, 10.0)
    try:
        link.look()
    except (RelayFault, UserError) as error:
        return Finding("FAIL", link.url, str(error), "start it, or correct sglang.relays")
    return Finding("OK", link.url, f"a relay in {link.path}")


def _launched(config: Config) -> Iterator[Finding]:
    """Check that the servers' Python environment has SGLang, and the trainer's NCCL version."""
    from megatron_stare.rollout.sglang.process import (
        nccl_version,
        own_nccl_version,
        server_command,
        server_python,
    )

    remedy = "set sglang.python to that of an environment that has"
    try:
        command = server_command(config.sglang)
        python = command[0] if config.sglang.command else server_python(config.sglang)
    except UserError as error:
        yield Finding("FAIL", "SGLang", "nothing starts a server", str(error))
        return
    ask = "from importlib.metadata import version; print(version('sglang'))"
    try:
        done = subprocess.run([python, "-c", ask], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        key = "command" if config.sglang.command else "python"
        yield Finding("FAIL", "SGLang", f"{python}: {error}", f"correct sglang.{key}")
        return
    if done.returncode:
        yield Finding("FAIL", "SGLang", f"{python} has none", remedy)
        return
    yield _sglang("SGLang", done.stdout.strip())
    yield from _glibc(platform.libc_ver()[1])
    if on_gpu() and config.sglang.transport == "broadcast":
        yield nccl_finding(own_nccl_version(), nccl_version([python]))


def _glibc(version: str) -> Iterator[Finding]:
    if on_gpu() and version and tuple(map(int, version.split(".")[:2])) < SGLANG_GLIBC:
        remedy = "use the container (docs/install.md)"
        yield Finding("FAIL", "glibc", f"{version}; SGLang's wheel is for 2.34", remedy)


def nccl_finding(ours: tuple[int, ...], theirs: tuple[int, ...] | None) -> Finding:
    """Check that trainer and servers have one NCCL version: NCCL connects no two different ones."""
    what = "servers' NCCL"
    if theirs is None:
        remedy = "set sglang.python to the servers' Python; if its NCCL differs, weights go over"
        return Finding("WARN", what, "unknown", f"{remedy} gloo")
    version = ".".join(map(str, theirs))
    if theirs == ours:
        return Finding("OK", what, version)
    found = f"{version}, the trainer's is {'.'.join(map(str, ours))}: weights go over gloo, by way"
    remedy = "install one version of nvidia-nccl in both environments"
    return Finding("WARN", what, f"{found} of host memory", remedy)


def _sglang(what: str, version: str) -> Finding:
    remedy = f"{TESTED_SGLANG} is what the tests run"
    return judged(version == TESTED_SGLANG, what, f"SGLang {version}", remedy)


def nearest_place(directory: Path) -> Path:
    """The directory, or the nearest parent of it that exists."""
    place = directory.absolute()
    return next(each for each in (place, *place.parents) if each.exists())


def disk(config: Config, runs: int = 1) -> Iterator[Finding]:
    """Check for space for the checkpoints that `runs` such runs keep, plus the one that each run is
    writing. FAIL: the first checkpoints do not fit.
    """
    place, checkpoints = nearest_place(Path(config.run.dir)), config.run.keep_last + 1
    needed = ENOUGH_DISK
    if config.policy.hf_checkpoint:
        # These modules import the model's code, which takes seconds.
        from megatron_stare.planning.memory import model_bytes
        from megatron_stare.planning.shapes import model_shape
        from megatron_stare.policy.huggingface.peft_files import adapter_table
        from megatron_stare.policy.huggingface.shape import shape_of

        with contextlib.suppress(UserError):
            hf = model_shape(config.policy.hf_checkpoint)
            saved = model_bytes(shape_of(hf))  # in bf16
            if config.adapters.rank:  # alone; shared ones have several rows
                rows = {row.megatron: row.shapes for row in adapter_table(hf, config.adapters)}
                saved = 2.0 * sum(math.prod(shape) for (shape,) in rows.values())
            # bf16 weights, fp32 weights and Adam's two moments: 2 + 12 bytes per parameter; and an
            # updated reference
            copies = 7 + bool(config.policy.ref_update_interval)
            needed = int(copies * saved * checkpoints * runs)
    free = shutil.disk_usage(place).free
    found = f"{free / GIB:,.1f} GiB free in {place}, {needed / GIB:,.1f} wanted for checkpoints"
    remedy = "give run.dir a larger place, or lower run.keep_last"
    otherwise: Level = "WARN" if free * checkpoints >= needed else "FAIL"
    yield judged(free >= needed, "disk", found, remedy, otherwise)


def _shared_memory(config: Config) -> Iterator[Finding]:
    if not Path("/dev/shm").is_dir():
        yield Finding("FAIL", "shared memory", "no /dev/shm", "mount a tmpfs there")
        return
    total = shutil.disk_usage("/dev/shm").total
    wanted = ENOUGH_SHARED if on_gpu() else LEAST_SHARED
    remedy = f"in a container: --shm-size={wanted // GIB or 1}g or --ipc=host"
    otherwise: Level = "WARN" if total >= LEAST_SHARED else "FAIL"
    found = f"{total / GIB:.2f} GiB"
    yield judged(total >= wanted, "shared memory", found, remedy, otherwise)


def _limits(config: Config) -> Iterator[Finding]:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = most == resource.RLIM_INFINITY or most >= ENOUGH_FILES  # a run raises its own limit
    remedy = f"ulimit -Hn {ENOUGH_FILES}"
    yield judged(enough, "open files", f"{files} (at most {most})", remedy)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = locked == resource.RLIM_INFINITY
    found = "unlimited" if unlimited else f"{locked / GIB:.2f} GiB"
    remedy = "ulimit -l unlimited: InfiniBand pins memory"
    yield judged(unlimited or not on_gpu(), "locked memory", found, remedy)
