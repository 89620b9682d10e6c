r"""Time and peak memory of the head, forward + backward,
next to the bare matrix products and to its peers.

    python benchmarks/head.py                                   the sizes of the CPU goal, 2 threads
    python benchmarks/head.py --device cuda --dtype bfloat16 --rows 8192 --width 4096 \
        --vocabulary 151936 --workspace-mib 768
    python benchmarks/head.py --peers DIR     DIR holds liger_kernel and verl (pip install --target)

Every contender makes the gradients of the mean surprisal of the same rows with respect to hidden
states and weight, in one run, round after round; the fastest round counts. "of products" is its
time over that of the three products (logits, hidden gradient, weight gradient) into preallocated
memory; "of their CPU time" compares the processor time instead, which other programs on the machine
disturb less. "extra" is its peak memory less what was there before it and less the two gradients.
What is missing or cannot run on this device gets a line that says why.

Shape legend: N rows, H hidden width, V vocabulary.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._measuring import PeakMemory, machine, timed
from megatron_stare.numerics.fused_loss import fused_loss
from megatron_stare.numerics.token_stats import VocabShard, Way, token_stats

PRODUCTS = "three bare products"


@dataclass
class Work:
    """The inputs of one run; hidden and weight collect gradients."""

    hidden_NH: Tensor
    weight_VH: Tensor
    target_N: Tensor
    workspace_bytes: int

    @property
    def shard(self) -> VocabShard:
        return VocabShard(self.weight_VH, None, self.weight_VH.shape[0])

    @property
    def device(self) -> torch.device:
        return self.hidden_NH.device

    def logits(self) -> Tensor:
        """[N, 1, V] as Megatron's output layer would return them: rows first, batch of one."""
        return torch.mm(self.hidden_NH, self.weight_VH.t()).unsqueeze(1)


@dataclass
class Contender:
    """One implementation. `gives` says what it computes; `unavailable` why it did not run."""

    name: str
    gives: str
    step: Callable[[], None] | None = None
    unavailable: str = ""
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    extra_bytes: int | None = None


def ours(work: Work) -> list[Contender]:
    """The three ways of megatron_stare."""
    rows = work.target_N.numel()

    def fused(entropy: bool) -> Callable[[], None]:
        def step() -> None:
            loss, *_ = fused_loss(
                work.hidden_NH,
                work.shard,
                work.target_N,
                (lambda surprisal, entropy_n, _: (surprisal + 0.01 * entropy_n) / rows)
                if entropy
                else (lambda surprisal, _, __: surprisal / rows),
                needs_entropy_grad=entropy,
                workspace_bytes=work.workspace_bytes,
            )
            loss.backward()

        return step

    def kept(way: Way) -> Callable[[], None]:
        def step() -> None:
            stats = token_stats(
                work.hidden_NH,
                work.shard,
                work.target_N,
                way=way,
                workspace_bytes=work.workspace_bytes,
            )
            stats.surprisal_N.mean().backward()

        return step

    return [
        Contender("ours: fused loss", "s, H", fused(entropy=False)),
        Contender("ours: fused loss, entropy gradient", "s, H, dH", fused(entropy=True)),
        Contender("ours: recompute", "s, H", kept("recompute")),
        Contender("ours: logits", "s, H", kept("logits")),
    ]


def bare_products(work: Work) -> list[Contender]:
    """The products that every head needs; and with one more, as recomputation needs."""
    logits_NV = torch.empty(work.target_N.numel(), work.weight_VH.shape[0]).to(work.hidden_NH)
    grad_NH, grad_VH = torch.empty_like(work.hidden_NH), torch.empty_like(work.weight_VH)

    def run(forwards: int) -> Callable[[], None]:
        def step() -> None:
            with torch.no_grad():
                for _ in range(forwards):
                    torch.mm(work.hidden_NH, work.weight_VH.t(), out=logits_NV)
                torch.mm(logits_NV, work.weight_VH, out=grad_NH)
                torch.mm(logits_NV.t(), work.hidden_NH, out=grad_VH)

        return step

    return [Contender(PRODUCTS, "", run(1)), Contender("four bare products", "", run(2))]


def plain_torch(work: Work) -> list[Contender]:
    """log_softmax in fp32 and autograd: what a short script does."""

    def step() -> None:
        log_probability_NV = torch.log_softmax(work.logits().squeeze(1).float(), dim=1)
        surprisal_N = -log_probability_NV.gather(1, work.target_N.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            _ = -(log_probability_NV.exp() * log_probability_NV).sum(1)
        surprisal_N.mean().backward()

    return [Contender("torch log_softmax", "s, H", step)]


def megatron_core(work: Work) -> list[Contender]:
    """Both cross entropies of Megatron-Core, on the logits its output layer returns."""
    try:
        from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
        from megatron.core.parallel_state import get_tensor_model_parallel_group
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
    except ImportError as error:
        return [
            Contender("megatron-core cross entropy", "s", unavailable=f"not installed: {error}")
        ]
    group, target_N1 = get_tensor_model_parallel_group(), work.target_N.unsqueeze(1)

    def plain() -> None:
        vocab_parallel_cross_entropy(work.logits(), target_N1, tp_group=group).mean().backward()

    def fused() -> None:
        fused_vocab_parallel_cross_entropy(work.logits(), target_N1, group).mean().backward()

    return [
        Contender("megatron-core cross entropy", "s", plain),
        Contender("megatron-core fused cross entropy", "s", fused),
    ]


def verl(work: Work) -> list[Contender]:
    """verl's Megatron actor: entropy of a clone, then log-probs;
    and its fused linear cross entropy.
    """
    names = ("verl vocab-parallel entropy + log-prob", "verl fused linear cross entropy")
    found = importlib.util.find_spec("verl")
    if found is None or found.origin is None:
        return [Contender(name, "s, H", unavailable="not installed") for name in names]
    folder = Path(found.origin).parent
    sharded = _from_file(folder / "utils/megatron/tensor_parallel.py")

    def unfused() -> None:
        logits_N1V = work.logits()
        kept_N1V = logits_N1V.clone()
        with torch.no_grad():
            sharded.vocab_parallel_entropy(logits_N1V)
        log_probability_N1 = sharded.vocab_parallel_log_probs_from_logits(
            kept_N1V, work.target_N.unsqueeze(1)
        )
        (-log_probability_N1).mean().backward()

    contenders = [Contender(names[0], "s, H", unfused)]
    if work.device.type != "cuda":
        return [
            *contenders,
            Contender(names[1], "s, H", unavailable="its Triton kernels assert CUDA tensors"),
        ]
    try:
        from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy
    except ImportError as error:
        return [
            *contenders,
            Contender(names[1], "s, H", unavailable=f"cannot be imported: {error}"),
        ]

    def fused() -> None:
        log_probability_N, _ = linear_cross_entropy(
            work.hidden_NH, work.weight_VH, work.target_N, 1.0, "none", None
        )
        (-log_probability_N).mean().backward()

    return [*contenders, Contender(names[1], "s, H", fused)]


def _from_file(path: Path) -> ModuleType:
    """A module of a package without the package's own imports (verl's __init__ wants Ray)."""
    spec = importlib.util.spec_from_file_location(f"peer_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def liger(work: Work) -> list[Contender]:
    """Liger's fused linear cross entropy and its vocab-parallel
    cross entropy (neither gives an entropy).
    """
    names = ("liger fused linear cross entropy", "liger vocab-parallel cross entropy")
    if importlib.util.find_spec("liger_kernel") is None:
        return [Contender(name, "s", unavailable="not installed") for name in names]
    if work.device.type != "cuda":
        return [
            Contender(name, "s", unavailable="Triton kernels, no CUDA driver here")
            for name in names
        ]
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    from megatron.core.parallel_state import get_tensor_model_parallel_group

    function = LigerFusedLinearCrossEntropyLoss()

    def fused_linear() -> None:
        function(work.weight_VH, work.hidden_NH, work.target_N).backward()

    contenders = [Contender(names[0], "s", fused_linear)]
    try:
        from liger_kernel.megatron.cross_entropy import LigerMegatronCrossEntropy
    except ImportError as error:
        return [*contenders, Contender(names[1], "s", unavailable=f"cannot be imported: {error}")]
    group, cross_entropy = get_tensor_model_parallel_group(), LigerMegatronCrossEntropy()

    def sharded() -> None:
        cross_entropy(work.logits(), work.target_N.unsqueeze(1), group).mean().backward()

    return [*contenders, Contender(names[1], "s", sharded)]


def measure(work: Work, contenders: list[Contender], rounds: int) -> None:
    """Fill in times (the first round warms up) and memory;
    a contender that fails is marked, not fatal.
    """
    for round_number in range(rounds + 1):
        for contender in contenders:
            if contender.step is None or contender.unavailable:
                continue
            work.hidden_NH.grad = work.weight_VH.grad = None
            try:
                with PeakMemory(work.device) as peak:
                    seconds, cpu_seconds = timed(contender.step, work.device)
            except Exception as error:
                contender.unavailable = f"failed: {type(error).__name__}: {str(error)[:80]}"
                continue
            if round_number:
                contender.seconds.append(seconds)
                contender.cpu_seconds.append(cpu_seconds)
                leaves = (work.hidden_NH, work.weight_VH)
                owned = sum(leaf.grad.nbytes for leaf in leaves if leaf.grad is not None)
                if peak.bytes is not None:
                    contender.extra_bytes = max(0, peak.bytes - owned)


def report(contenders: list[Contender], title: str) -> list[dict[str, object]]:
    """Print the table; return its rows."""
    table = Table(title=title)
    for name in ("implementation", "gives", "ms", "of products", "of their CPU time", "extra MiB"):
        table.add_column(name, justify="left" if name in ("implementation", "gives") else "right")
    products = next(other for other in contenders if other.name == PRODUCTS)
    rows: list[dict[str, object]] = []
    for contender in contenders:
        row: dict[str, object] = {"name": contender.name, "gives": contender.gives}
        rows.append(row)
        if contender.unavailable:
            row["unavailable"] = contender.unavailable
            continue
        row["seconds"] = min(contender.seconds)
        row["ratio"] = round(min(contender.seconds) / min(products.seconds), 3)
        row["cpu_ratio"] = round(min(contender.cpu_seconds) / min(products.cpu_seconds), 3)
        row["MiB"] = (
            None if contender.extra_bytes is None else round(contender.extra_bytes / 2**20, 1)
        )
        figures = (
            f"{min(contender.seconds) * 1e3:.0f}",
            f"{row['ratio']:.2f}",
            f"{row['cpu_ratio']:.2f}",
        )
        table.add_row(contender.name, contender.gives, *figures, str(row["MiB"]))
    console = Console(width=118)
    console.print(table)
    for row in rows:
        if "unavailable" in row:
            console.print(f"not measured: {row['name']}: {row['unavailable']}")
    return rows


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=32_768)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float64"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workspace-mib", type=int, default=64)
    parser.add_argument(
        "--only",
        default="",
        help="a regular expression: the contenders to run, next to the products",
    )
    parser.add_argument(
        "--peers", type=Path, help="a folder with liger_kernel and verl, put at the end of sys.path"
    )
    parser.add_argument("--json", type=Path, help="write the table and the machine here")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    if options.peers:
        sys.path.append(str(options.peers))
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    generator = torch.Generator(device).manual_seed(0)
    shape = {"generator": generator, "device": device, "dtype": dtype}
    work = Work(
        torch.randn(options.rows, options.width, **shape).requires_grad_(),
        (
            torch.randn(options.vocabulary, options.width, **shape) * options.width**-0.5
        ).requires_grad_(),
        torch.randint(0, options.vocabulary, (options.rows,), generator=generator, device=device),
        options.workspace_mib << 20,
    )
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        if importlib.util.find_spec("megatron") is not None:
            from megatron.core import parallel_state

            parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        makers = (bare_products, ours, plain_torch, megatron_core, verl, liger)
        contenders = [contender for maker in makers for contender in maker(work)]
        contenders = [
            other
            for other in contenders
            if other.name == PRODUCTS or re.search(options.only, other.name)
        ]
        measure(work, contenders, options.rounds)
        dist.destroy_process_group()
    title = (
        f"N={options.rows} H={options.width} V={options.vocabulary} {options.dtype} "
        f"{options.device}, "
    )
    title += f"{options.threads} threads, workspace {options.workspace_mib} MiB"
    rows = report(contenders, title)
    if options.json:
        document = {"machine": machine(device), "options": vars(options), "rows": rows}
        options.json.write_text(json.dumps(document, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
