"""Every line that CUDA decides, but for those of a table, has been entered by the tests that ran on
the device before this one (tests/conftest.py puts it last), in their own process or in one that
they started.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.nullcuda.branches import places
from tools.nullcuda.lines import FOLDER, seen

pytestmark = pytest.mark.nullcuda
# What no test here enters yet, by what it takes. The table stays exact: a place that is entered
# after all, or is not there any more, has no business in it.
RANKS, SERVER, WORKERS = "commands/cluster.py", "loop/sync/update_group.py", "loop/workers/"
NOT_ENTERED: dict[str, tuple[str, ...]] = {
    "doctor --cluster on several ranks that have GPUs": (
        f'{RANKS}: backend = "nccl" if on_gpu else "gloo"',
        f"{RANKS}: if on_gpu",
        f'{RANKS}: on_gpu = runtime.device().type == "cuda"',
        f"{RANKS}: size, least = (GPU_SIZE, GPU_LEAST) if on_gpu else (HOST_SIZE, HOST_LEAST)",
        f"{RANKS}: torch.cuda.synchronize()",
    ),
    "an SGLang on the device, that is asked or joins a group": (
        'commands/doctor.py: built = torch.version.cuda or "none"',
        "commands/doctor.py: "
        'if torch.cuda.is_available() and config.sglang.sync_method == "broadcast"',
        "commands/doctor.py: yield nccl_finding(torch.cuda.nccl.version(), nccl_version([python]))",
        f'{SERVER}: device = "cuda" if backend == "nccl" else "cpu"',
        f"{SERVER}: device = torch.cuda.current_device() if torch.cuda.is_available() else None",
        f'{SERVER}: if backend == "nccl"',
        f"{SERVER}: options = dist.ProcessGroupNCCL.Options()",
        f"{SERVER}: torch.cuda.set_device(device)  # each thread has one of its own",
        "rollout/sglang/server.py: return Layout(self.info.tensor_size, getattr(torch, dtype), "
        'self.info.device == "cuda")',
    ),
    "worker processes with an engine of their own": (
        f"{WORKERS}worker.py: torch.cuda.set_device(plan.device)",
        f"{WORKERS}workers.py: "
        'on_gpu = config.rollout.engine == "embedded" and torch.cuda.is_available()',
        f"{WORKERS}workers.py: self.shares = [",
    ),
    "tensor- or context-parallel ranks": (
        "numerics/selection.py: "
        'return tensor.to(torch.device("cuda", torch.cuda.current_device()))',
        'policy/topology.py: os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")',
    ),
}


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="no TransformerEngine here"
)
def test_every_place_that_cuda_decides_was_entered() -> None:
    """Of the whole suite (`make nullcuda`): a part of it enters a part."""
    wanted, entered = places(), seen(Path(os.environ[FOLDER]))
    assert wanted and entered
    missed = [str(place) for place in wanted if (str(place.file), place.line) not in entered]
    print(f"{len(wanted)} places, {len(wanted) - len(missed)} entered:", *wanted, sep="\n")
    unnumbered = {":".join(place.split(":")[::2]).strip() for place in missed}
    known = {f"megatron_stare/{place}" for places in NOT_ENTERED.values() for place in places}
    assert not unnumbered - known, "\n".join(["never entered:", *sorted(unnumbered - known)])
    assert not known - unnumbered, "\n".join(["entered, or gone:", *sorted(known - unnumbered)])
