"""K3: speeds of the parts of a training step.

Shape legend: N tokens, H hidden width, V vocabulary.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import torch

from megatron_stare.commands.gpuday.kernels import (
    HeadSample,
    device,
    peak_bytes,
    run_workspace,
    seconds,
)
from megatron_stare.commands.gpuday.results import Day, Measurement, at_least, at_most
from megatron_stare.planning.machine import H100
from megatron_stare.policy import runtime

TOKENS = 8704  # a micro-batch of the 32B recipes
# Of one 32B layer under TP8: inputs and outputs of qkv, projection, gate and up, down.
PRODUCTS = ((5120, 896), (640, 5120), (5120, 6912), (3456, 5120))
HEAD = (8192, 4096, 151936)
SEQUENCE, HEADS = 32768, 5
# Shares of the peak on the first GPU that ran the kit (docs/gpuday_h200.md). The planner's
# matrix_share is another figure: it includes launches and the kernels between the products.
PRODUCTS_SHARE, MLP_SHARE = 0.75, 0.62


def run(day: Day) -> Iterator[Measurement]:
    """Memory, matrix products, attention, a layer and the head."""
    small = day.rehearsal
    runtime.prepare()
    yield _memory(1 << 20 if small else 1 << 32)
    side = 64 if small else 8192
    yield at_least(
        "one large bf16 product", _product(side, side, side) / 1e12, 0.75 * 989, "TFLOP/s"
    )
    yield _shares(64 if small else TOKENS, 32 if small else 1)
    yield _attention(128 if small else SEQUENCE)
    yield _layer(64 if small else TOKENS)
    yield from _head(*((64, 32, 512) if small else HEAD))


def _memory(size: int) -> Measurement:
    """Bytes read and written per second by a copy."""
    source = torch.ones(size // 4, device=device())
    target = torch.empty_like(source)
    rate = 2 * size / seconds(lambda: target.copy_(source))
    return at_least("copy in memory", rate / 1e12, H100.memory_rate * 0.85 / 1e12, "TB/s")


def _product(rows: int, summands: int, columns: int) -> float:
    """Operations per second of one product."""
    left = torch.randn(rows, summands, device=device()).bfloat16()
    right = torch.randn(summands, columns, device=device()).bfloat16()
    found = torch.empty(rows, columns, device=device(), dtype=torch.bfloat16)
    return 2 * rows * summands * columns / seconds(lambda: torch.mm(left, right, out=found))


def _shares(tokens: int, divisor: int) -> Measurement:
    """All products of a layer, forward and backward: operations over the seconds of all. Widths are
    divided by `divisor`.
    """
    operations, spent = 0.0, 0.0
    for inputs, outputs in ((one // divisor, other // divisor) for one, other in PRODUCTS):
        for shape in (
            (tokens, inputs, outputs),
            (tokens, outputs, inputs),
            (outputs, tokens, inputs),
        ):
            one = 2.0 * tokens * inputs * outputs
            operations, spent = operations + one, spent + one / _product(*shape)
    share = operations / spent / H100.operations
    return at_least("products of a 32B layer, TP8", share, PRODUCTS_SHARE, "of peak")


def _attention(length: int) -> Measurement:
    """Causal attention of one sequence, forward and backward. A training step has three times the
    forward pass's 2 S^2 D operations per head.
    """
    shape = (1, HEADS, length, 128)
    parts = [
        torch.randn(shape, device=device(), dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    attend, name = _attend(length)

    def step() -> None:
        for part in parts:
            part.grad = None
        attend(*parts).sum().backward()

    operations = 3 * 2 * length**2 * 128 * HEADS
    share = operations / seconds(step) / H100.operations
    return at_least(
        f"attention of {length:,} tokens ({name})",
        share,
        H100.attention_share,
        "of peak",
        "attention_share",
    )


def _attend(length: int) -> tuple[Callable[..., torch.Tensor], str]:
    """TransformerEngine's attention of packed sequences where it is installed, else torch's."""
    if device().type == "cpu" or importlib.util.find_spec("transformer_engine") is None:
        attention = torch.nn.functional.scaled_dot_product_attention
        return lambda q, k, v: attention(q, k, v, is_causal=True), "torch"
    import transformer_engine.pytorch as te

    module = te.DotProductAttention(
        HEADS, 128, qkv_format="thd", attn_mask_type="padding_causal", attention_dropout=0.0
    )
    ends = torch.tensor([0, length], dtype=torch.int32, device=device())

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        packed = [each[0].transpose(0, 1).contiguous() for each in (q, k, v)]
        bounds = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
        lengths = {"max_seqlen_q": length, "max_seqlen_kv": length}
        found: torch.Tensor = module(*packed, **bounds, **lengths)
        return found

    return attend, "TransformerEngine"


def _layer(tokens: int) -> Measurement:
    """TransformerEngine's MLP of a 32B layer under TP8, forward and backward."""
    if device().type == "cpu" or importlib.util.find_spec("transformer_engine") is None:
        return Measurement("TransformerEngine MLP", "not measured: no GPU, or not installed")
    import transformer_engine.pytorch as te

    width, inner = (64, 96) if tokens < TOKENS else (5120, 3456)
    settings = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False}
    layer = te.LayerNormMLP(width, inner, params_dtype=torch.bfloat16, **settings)
    values = torch.randn(tokens, width, device=device(), dtype=torch.bfloat16, requires_grad=True)
    spent = seconds(lambda: layer(values).sum().backward())
    rate = 3 * 2 * tokens * 3 * width * inner / spent
    share = rate / H100.operations
    return at_least("TransformerEngine MLP of a 32B layer", share, MLP_SHARE, "of peak")


def _head(rows: int, width: int, vocabulary: int) -> Iterator[Measurement]:
    """The head over its three bare products, which no head can do without."""
    head, name = HeadSample.make(rows, width, vocabulary), f"head {rows:,} x {vocabulary:,}"
    operations = 2.0 * rows * width * vocabulary
    shapes = ((rows, width, vocabulary), (rows, vocabulary, width), (vocabulary, rows, width))
    bare = sum(operations / _product(*shape) for shape in shapes)
    spent = seconds(head.step)
    yield at_most(f"{name}, forward and backward", spent * 1e3, bare * 1.15e3, "ms")
    if device().type == "cuda":
        extra = peak_bytes(head.step) - 2.0 * rows * width
        yield at_most(f"{name}, memory of a chunk", extra / 2**30, run_workspace() / 2**30, "GiB")
