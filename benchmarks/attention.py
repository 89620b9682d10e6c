r"""Time and memory of the core attention, forward + backward,
next to torch's own and Megatron-Core's local one.

    python benchmarks/attention.py                         a Qwen2.5-0.5B layer on the CPU, 1 thread
    python benchmarks/attention.py --tokens 32768 --longest 32768 --device cuda --dtype bfloat16 \
        --heads 32 --groups 8 --width 128
    python benchmarks/attention.py --json attention.json

Every case holds the same number of tokens: padded batches of several lengths, and a packed batch of
mixed lengths. Contenders run round after round, the fastest round counts. "saved" is what autograd
keeps alive between forward and backward, inputs and output included; "peak" what the whole step
takes beyond its inputs. What is missing, would need more than --limit-mib for its scores, or cannot
run here gets a line that says why.

Shape legend: S positions, B sequences, T packed tokens, H query heads, G key-value heads, D head
width.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._measuring import PeakMemory, machine, timed
from megatron_stare.policy import runtime
from megatron_stare.policy.cpu_layers.attention import CoreAttention

PACK = "packed, mixed lengths"


@dataclass
class Case:
    """Lengths of the sequences and their inputs:
    [S, B, heads, D], or [T, heads, D] where `packed`.
    """

    name: str
    lengths: list[int]
    packed: bool
    query: Tensor
    key: Tensor
    value: Tensor

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value


@dataclass
class Contender:
    """One implementation on one case. `unavailable` says why it did not run."""

    name: str
    run: Callable[[], Tensor] | None = None
    unavailable: str = ""
    seconds: list[float] = field(default_factory=list)
    saved_bytes: int = 0
    peak_bytes: int | None = None


def cases(options: argparse.Namespace) -> list[Case]:
    """Padded batches of --tokens tokens at lengths 4 apart up to --longest, and one pack."""
    generator = torch.Generator().manual_seed(0)

    def tensors(*tokens: int) -> list[Tensor]:
        shapes = [
            (*tokens, heads, options.width)
            for heads in (options.heads, options.groups, options.groups)
        ]
        made = [torch.randn(shape, generator=generator) for shape in shapes]
        return [x.to(options.device, getattr(torch, options.dtype)).requires_grad_() for x in made]

    found = []
    length = options.longest
    while length >= options.shortest:
        batch = options.tokens // length
        found.append(
            Case(f"padded {batch} x {length}", [length] * batch, False, *tensors(length, batch))
        )
        length //= 4
    lengths: list[int] = []
    while sum(lengths) < options.tokens:
        drawn = int(
            torch.randint(options.shortest // 4, options.longest // 4, (), generator=generator)
        )
        lengths.append(min(drawn, options.tokens - sum(lengths)))
    name = f"{PACK}: {len(lengths)} of {min(lengths)} to {max(lengths)}"
    return [*reversed(found), Case(name, lengths, True, *tensors(options.tokens))]


def contenders(case: Case, limit_bytes: int) -> list[Contender]:
    return [
        ours(case),
        *(torch_packed(case, limit_bytes) if case.packed else torch_padded(case, limit_bytes)),
    ]


def ours(case: Case) -> Contender:
    width = case.query.shape[-1]
    config = SimpleNamespace(context_parallel_size=1, kv_channels=width, attention_dropout=0.0)
    attention, params = CoreAttention(config, 1, "causal", "self"), None
    if case.packed:
        starts = torch.tensor(
            [0, *itertools.accumulate(case.lengths)], dtype=torch.int32, device=case.query.device
        )
        fields = {
            "cu_seqlens_q": starts,
            "cu_seqlens_kv": starts,
            "cu_seqlens_q_padded": None,
            "local_cp_size": None,
        }
        params = SimpleNamespace(qkv_format="thd", **fields)
    return Contender("ours", lambda: attention(*case.inputs, packed_seq_params=params))


def fused(q: Tensor, k: Tensor, v: Tensor, **mask: Any) -> Tensor:
    """torch's attention on [B, heads, S, D]."""
    return nn.functional.scaled_dot_product_attention(
        q, k, v, enable_gqa=q.shape[1] != k.shape[1], **mask
    )


def torch_padded(case: Case, limit_bytes: int) -> list[Contender]:
    """torch's SDPA, and Megatron-Core's DotProductAttention, which keeps the scores."""

    def sdpa() -> Tensor:
        return (
            fused(*(x.permute(1, 2, 0, 3) for x in case.inputs), is_causal=True)
            .permute(2, 0, 1, 3)
            .flatten(2)
        )

    return [Contender("torch SDPA", sdpa), megatron(case, limit_bytes)]


def megatron(case: Case, limit_bytes: int) -> Contender:
    name = "Megatron DotProductAttention"
    length, batch, heads, width = case.query.shape
    needs = 3 * batch * heads * length**2 * case.query.element_size()
    if needs > limit_bytes:
        return Contender(name, unavailable=f"about {needs >> 20} MiB of scores")
    try:
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.dot_product_attention import DotProductAttention
        from megatron.core.transformer.enums import AttnMaskType
    except ImportError as error:
        return Contender(name, unavailable=f"not installed: {error}")
    half = case.query.dtype == torch.bfloat16
    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads * width,
        num_attention_heads=heads,
        num_query_groups=case.key.shape[2],
        kv_channels=width,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        bf16=half,
        params_dtype=case.query.dtype,
    )
    attention = DotProductAttention(config, 1, AttnMaskType.causal, "self")
    future_SS = torch.ones(length, length, dtype=torch.bool, device=case.query.device).triu(1)
    return Contender(name, lambda: attention(*case.inputs, future_SS[None, None]))


def torch_packed(case: Case, limit_bytes: int) -> list[Contender]:
    """torch's SDPA three ways: a call per sequence, padded to the longest,
    one call under a block-diagonal mask.
    """

    def looped() -> Tensor:
        parts = zip(
            *(x.transpose(0, 1).unsqueeze(0).split(case.lengths, dim=2) for x in case.inputs),
            strict=True,
        )
        return (
            torch.cat([fused(*part, is_causal=True) for part in parts], 2)
            .squeeze(0)
            .transpose(0, 1)
            .flatten(1)
        )

    real = torch.arange(max(case.lengths)) < torch.tensor(case.lengths).unsqueeze(1)
    rows = real.flatten().nonzero().flatten().to(case.query.device)

    def padded() -> Tensor:
        def spread(x: Tensor) -> Tensor:
            filled = x.new_zeros(real.numel(), *x.shape[1:]).index_copy(0, rows, x)
            return filled.unflatten(0, real.shape).transpose(1, 2)

        out = fused(*(spread(x) for x in case.inputs), is_causal=True)
        return out.transpose(1, 2).flatten(0, 1).index_select(0, rows).flatten(1)

    tokens = sum(case.lengths)
    found = [
        Contender("torch SDPA, a call per sequence", looped),
        Contender("torch SDPA, padded", padded),
    ]
    needs = (4 + case.query.shape[1]) * tokens**2
    if needs > limit_bytes:
        return [
            *found,
            Contender(
                "torch SDPA, [T, T] mask", unavailable=f"up to {needs >> 20} MiB of mask and scores"
            ),
        ]
    number = torch.repeat_interleave(torch.arange(len(case.lengths)), torch.tensor(case.lengths))
    seen_TT = ((number.unsqueeze(0) == number.unsqueeze(1)).tril()).to(case.query.device)

    def masked() -> Tensor:
        out = fused(*(x.transpose(0, 1).unsqueeze(0) for x in case.inputs), attn_mask=seen_TT)
        return out.squeeze(0).transpose(0, 1).flatten(1)

    return [*found, Contender("torch SDPA, [T, T] mask", masked)]


def measure(case: Case, found: list[Contender], rounds: int) -> None:
    """Fill in times (the first round warms up); one that fails is marked, not fatal."""
    gradient, first = None, None
    for round_number, contender in itertools.product(range(rounds + 1), found):
        if contender.run is None or contender.unavailable:
            continue
        kept: dict[int, int] = {}

        def keep(x: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        def step(
            run: Callable[[], Tensor] = contender.run, keep: Callable[[Tensor], Tensor] = keep
        ) -> None:
            nonlocal gradient, first
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                out = run()
            gradient = torch.ones_like(out).detach() if gradient is None else gradient
            first = out.detach() if first is None else first
            torch.testing.assert_close(out.detach(), first, rtol=0.02, atol=0.02)
            torch.autograd.grad(out, case.inputs, gradient)

        try:
            _trim()
            with PeakMemory(case.query.device) as peak:
                seconds, _ = timed(step, case.query.device)
        except Exception as error:
            contender.unavailable = (
                f"failed: {type(error).__name__}: {' '.join(str(error).split())[:90]}"
            )
            continue
        if round_number:
            contender.seconds.append(seconds)
            contender.saved_bytes = sum(kept.values())
            contender.peak_bytes = (
                None if peak.bytes is None else max(peak.bytes, contender.peak_bytes or 0)
            )


def _trim() -> None:
    """Give freed memory back to the system, so that using it again shows (glibc only)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def report(case: Case, found: list[Contender]) -> list[dict[str, object]]:
    """Print the case's table; return its rows."""
    table = Table(title=case.name)
    for name in ("implementation", "ms", "of ours", "saved MiB", "peak MiB"):
        table.add_column(name, justify="left" if name == "implementation" else "right")
    rows: list[dict[str, object]] = []
    reference = min(found[0].seconds)
    for contender in found:
        row: dict[str, object] = {"case": case.name, "name": contender.name}
        rows.append(row)
        if contender.unavailable:
            row["unavailable"] = contender.unavailable
            continue
        best = min(contender.seconds)
        row |= {"seconds": best, "of_ours": round(best / reference, 3)}
        row["saved_MiB"] = round(contender.saved_bytes / 2**20, 2)
        row["peak_MiB"] = (
            None if contender.peak_bytes is None else round(contender.peak_bytes / 2**20, 1)
        )
        figures = (
            f"{best * 1e3:.1f}",
            f"{row['of_ours']:.2f}",
            str(row["saved_MiB"]),
            str(row["peak_MiB"]),
        )
        table.add_row(contender.name, *figures)
    console = Console(width=110)
    console.print(table)
    for row in rows:
        if "unavailable" in row:
            console.print(f"not measured: {row['name']}: {row['unavailable']}")
    return rows


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048, help="in every case")
    parser.add_argument("--longest", type=int, default=2048)
    parser.add_argument("--shortest", type=int, default=32)
    parser.add_argument("--heads", type=int, default=14)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float64"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--limit-mib",
        type=int,
        default=2048,
        help="contenders that need more for scores are left out",
    )
    parser.add_argument("--json", type=Path, help="write the tables and the machine here")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    runtime.prepare()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if options.device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(1)
        for case in cases(options):
            found = contenders(case, options.limit_mib << 20)
            measure(case, found, options.rounds)
            rows += report(case, found)
        dist.destroy_process_group()
    if options.json:
        document = {
            "machine": machine(torch.device(options.device)),
            "options": vars(options),
            "rows": rows,
        }
        options.json.write_text(json.dumps(document, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
