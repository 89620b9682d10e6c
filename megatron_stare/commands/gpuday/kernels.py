"""K1: the kernels of this project at the sizes of real runs, against float64. K3: speeds of the
parts of a training step.

Shape legend: N rows (tokens), n sampled rows, H hidden width, V vocabulary, v sampled columns.
"""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_stare.commands.gpuday.rows import Day, Measurement, at_least, at_most, holds, within
from megatron_stare.commands.gpuday.stages import checkout, succeeds
from megatron_stare.config import PolicyConfig
from megatron_stare.debug.cluster import median_seconds
from megatron_stare.numerics.fused_loss import fused_loss
from megatron_stare.numerics.hashes import tile_total
from megatron_stare.numerics.token_stats import VocabShard, token_stats
from megatron_stare.numerics.weight_gradient import add_product_
from megatron_stare.planning.machine import H100
from megatron_stare.policy import runtime
from megatron_stare.policy.runtime import device
from megatron_stare.policy.tuning import hardware, workspace_bytes

# Rows, hidden width, vocabulary: a rank of the 32B recipes under TP8, and one whole head with
# 34,816 * 151,936 = 5.3e9 logits, more than a 32-bit index reaches. The last two: of K3, and of
# a rehearsal.
RANK, WHOLE = (8704, 5120, 18992), (34816, 4096, 151936)
TIMED, SMALL = (8192, 4096, 151936), (64, 32, 512)
SAMPLED = 256
MOST_NATS, MOST_RELATIVE = 0.2, 0.03  # logits are bf16: half a step of 2^-4 for logits up to 16
TOKENS = 8704  # a micro-batch of the 32B recipes
# Of one 32B layer under TP8: inputs and outputs of qkv, projection, gate and up, down.
PRODUCTS = ((5120, 896), (640, 5120), (5120, 6912), (3456, 5120))
SEQUENCE, HEADS = 32768, 5
# Shares of the peak on the first GPU that ran the kit (docs/gpuday_h200.md). The planner's
# matrix_share is another figure: it includes launches and the kernels between the products.
PRODUCTS_SHARE, MLP_SHARE = 0.75, 0.62


seconds = functools.partial(median_seconds, rounds=10)


def peak_bytes(work: Callable[[], object]) -> float:
    """The bytes that torch's allocator held in addition at its peak; 0 on a CPU."""
    if not torch.cuda.is_available():
        work()
        return 0.0
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    return float(torch.cuda.max_memory_allocated() - before)


class HeadSample:
    """A head in bf16 on random inputs, whose logits are standard normal."""

    def __init__(self, rows: int, width: int, vocabulary: int) -> None:
        self.name = f"head {rows:,} x {vocabulary:,}"
        generator = torch.Generator(device()).manual_seed(0)
        place: dict[str, Any] = {"generator": generator, "device": device()}
        hidden_NH = torch.randn(rows, width, dtype=torch.bfloat16, **place)
        weight_VH = torch.randn(vocabulary, width, dtype=torch.bfloat16, **place) * width**-0.5
        self.target_N = torch.randint(0, vocabulary, (rows,), **place)
        self.weight_grad_VH = torch.zeros(vocabulary, width, device=device())  # fp32
        weight_VH.main_grad = self.weight_grad_VH
        self.hidden_NH, self.weight_VH = hidden_NH.requires_grad_(), weight_VH.requires_grad_()
        self.shard = VocabShard(self.weight_VH, None, vocabulary)
        # Bytes for a chunk of logits in a run on this machine with the default settings.
        self.workspace = workspace_bytes(PolicyConfig(), hardware().memory_bytes)

    def step(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Surprisal, entropy and both gradients of the mean surprisal, as a run has them: in chunks
        of its workspace, with the weight's gradient in fp32. The next step overwrites that.
        """
        self.weight_grad_VH.zero_()
        rows = self.target_N.numel()
        loss, surprisal_N, entropy_N, _ = fused_loss(
            self.hidden_NH,
            self.shard,
            self.target_N,
            lambda surprisal, _, __: surprisal / rows,
            workspace_bytes=self.workspace,
        )
        (hidden_grad_NH,) = torch.autograd.grad(loss, self.hidden_NH)
        return surprisal_N, entropy_N, hidden_grad_NH, self.weight_grad_VH


def right(day: Day) -> Iterator[Measurement]:
    """K1: the tests marked `gpu`, then each kernel at real sizes."""
    if root := checkout():
        # Files without such tests are left out: to collect thousands of tests takes minutes.
        files = [f for f in sorted((root / "tests").rglob("*.py")) if "mark.gpu" in f.read_text()]
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
        command += ["--rootdir", str(root), *map(str, files)]
        yield succeeds("tests marked gpu", command)
    else:
        yield holds("tests marked gpu", False, "not run: the checkout has no tests", "WARN")
    for size in (SMALL,) if day.rehearsal else (RANK, WHOLE):
        yield from _head_against_float64(HeadSample(*size))
    yield _products(64 if day.rehearsal else 8704)
    yield _hashes(20_000 if day.rehearsal else 500_000_003)
    if program := shutil.which("compute-sanitizer"):
        small = f"from {__name__} import HeadSample; HeadSample(*{SMALL}).step()"
        options = ["--tool", "memcheck", "--error-exitcode", "9"]
        command = [program, *options, sys.executable, "-c", small]
        yield succeeds("compute-sanitizer memcheck", command)
    else:
        yield Measurement("compute-sanitizer", "not run: it is not installed (CUDA toolkit)")


def _head_against_float64(head: HeadSample) -> Iterator[Measurement]:
    """Statistics and gradients of some rows and columns."""
    surprisal_N, entropy_N, hidden_grad_NH, weight_grad_VH = head.step()
    rows, vocabulary = head.target_N.numel(), len(head.weight_VH)
    some = torch.linspace(0, rows - 1, min(rows, SAMPLED), device=device()).long()
    hidden_nH = head.hidden_NH.detach()[some].double().requires_grad_()
    log_nV = torch.log_softmax(hidden_nH @ head.weight_VH.detach().double().t(), 1)
    expected_n = -log_nV.gather(1, head.target_N[some].unsqueeze(1)).squeeze(1)
    (expected_nH,) = torch.autograd.grad(expected_n.sum() / rows, hidden_nH)
    log_nV, expected_n = log_nV.detach(), expected_n.detach()
    far = _most(surprisal_N[some] - expected_n)
    yield within(f"{head.name}: surprisal", far, MOST_NATS, "nats")
    far = _most(entropy_N[some] + (log_nV.exp() * log_nV).sum(1))
    yield within(f"{head.name}: entropy", far, MOST_NATS, "nats")
    del log_nV
    far = relative_error(hidden_grad_NH[some], expected_nH)
    yield within(f"{head.name}: gradient of hidden states", far, MOST_RELATIVE)
    columns = torch.linspace(0, vocabulary - 1, 64, device=device()).long()
    expected_vH = _weight_gradient(head, surprisal_N, columns)
    far = relative_error(weight_grad_VH[columns], expected_vH)
    yield within(f"{head.name}: gradient of the weight", far, MOST_RELATIVE)
    with torch.no_grad():
        stats = token_stats(head.hidden_NH, head.shard, head.target_N, collision=True)
    far = _most(stats.surprisal_N - surprisal_N)
    yield within(f"{head.name}: statistics as the loss", far, 1e-4, "nats")
    kept = [value.clone() for value in (surprisal_N, hidden_grad_NH, weight_grad_VH)]
    again = head.step()
    same = all(torch.equal(a, b) for a, b in zip(kept, (again[0], *again[2:]), strict=True))
    yield holds(f"{head.name}: bits of two runs are equal", same, otherwise="WARN")


def _weight_gradient(head: HeadSample, surprisal_N: Tensor, columns: Tensor) -> Tensor:
    """Rows `columns` of the weight's gradient in float64. Of the forward pass it takes only
    surprisal_N: the logarithm of a row's sum is that plus the target's logit.
    """
    hidden_NH, weight_VH = head.hidden_NH.detach().double(), head.weight_VH.detach()
    logit_N = (hidden_NH * weight_VH[head.target_N].double()).sum(1)
    log_N = surprisal_N.double() + logit_N
    slope_Nv = (hidden_NH @ weight_VH[columns].double().t() - log_N.unsqueeze(1)).exp()
    slope_Nv -= (head.target_N.unsqueeze(1) == columns).double()
    return slope_Nv.t() @ hidden_NH / head.target_N.numel()


def _products(summands: int) -> Measurement:
    """Products of bf16 that accumulate in fp32, as gradients of the output weight do."""
    generator = torch.Generator(device()).manual_seed(1)
    place: dict[str, Any] = {"generator": generator, "device": device(), "dtype": torch.bfloat16}
    left, right = torch.randn(256, summands, **place), torch.randn(summands, 256, **place)
    start = torch.randn(256, 256, generator=generator, device=device())
    found = start.clone()
    add_product_(found, left, right, beta=1.0)
    expected = start.double() + left.double() @ right.double()
    return within(f"fp32 sum of {summands:,} bf16 products", relative_error(found, expected), 1e-5)


def _hashes(elements: int) -> Measurement:
    """The hash that SGLang's servers compute of a weight, by the kernel and by torch on the CPU."""
    words = torch.arange(elements, dtype=torch.int32) * 2654435 + 7
    found = int(tile_total(words.to(device())))
    return holds(f"tile hash of {elements:,} words", found == int(tile_total(words)))


def _most(difference: Tensor) -> float:
    """The largest absolute difference; NaN if there is one."""
    return float(difference.abs().max())


def relative_error(found: Tensor, reference: Tensor) -> float:
    """|found - reference| / |reference|, Euclidean norms in float64; NaN if one is not finite."""
    return float((found.double() - reference).norm() / reference.norm())


def fast(day: Day) -> Iterator[Measurement]:
    """K3: memory, matrix products, attention, a layer and the head."""
    small = day.rehearsal
    runtime.prepare()
    size = 1 << 20 if small else 1 << 32
    source = torch.ones(size // 4, device=device())
    target = torch.empty_like(source)
    rate = 2 * size / seconds(lambda: target.copy_(source))
    yield at_least("copy in memory", rate / 1e12, H100.memory_rate * 0.85 / 1e12, "TB/s")
    side = 64 if small else 8192
    rate = 2 * side**3 / _product(side, side, side)
    yield at_least("one large bf16 product", rate / 1e12, 0.75 * 989, "TFLOP/s")
    tokens, divisor = (64, 32) if small else (TOKENS, 1)
    widths = [(inputs // divisor, outputs // divisor) for inputs, outputs in PRODUCTS]
    operations = sum(3 * 2 * tokens * inputs * outputs for inputs, outputs in widths)
    share = operations / sum(_three_products(tokens, *each) for each in widths) / H100.operations
    yield at_least("products of a 32B layer, TP8", share, PRODUCTS_SHARE, "of peak")
    yield _attention(128 if small else SEQUENCE)
    yield _layer(tokens)
    head = HeadSample(*(SMALL if small else TIMED))
    bare = _three_products(*(SMALL if small else TIMED))  # which no head can do without
    name, spent = f"{head.name}, forward and backward", seconds(head.step)
    yield at_most(name, spent * 1e3, bare * 1.15e3, "ms")
    if torch.cuda.is_available():
        extra = (peak_bytes(head.step) - 2.0 * head.hidden_NH.numel()) / 2**30
        yield at_most(f"{head.name}, memory of a chunk", extra, head.workspace / 2**30, "GiB")


def _product(rows: int, summands: int, columns: int) -> float:
    """Seconds of one product."""
    left = torch.randn(rows, summands, device=device()).bfloat16()
    right = torch.randn(summands, columns, device=device()).bfloat16()
    found = torch.empty(rows, columns, device=device(), dtype=torch.bfloat16)
    return seconds(lambda: torch.mm(left, right, out=found))


def _three_products(rows: int, inputs: int, outputs: int) -> float:
    """Seconds of the forward product and both of the backward pass."""
    shapes = ((rows, inputs, outputs), (rows, outputs, inputs), (outputs, rows, inputs))
    return sum(_product(*shape) for shape in shapes)


def _attention(length: int) -> Measurement:
    """Causal attention of one packed sequence, forward and backward: TransformerEngine's where it
    is installed, else torch's. A training step has three times the forward pass's 2 S^2 D
    operations per head.
    """
    attend: Any
    shape: tuple[int, ...]
    if hardware().has_transformer_engine:
        import transformer_engine.pytorch as te

        ends = torch.tensor([0, length], dtype=torch.int32, device=device())
        bounds = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
        lengths = {"max_seqlen_q": length, "max_seqlen_kv": length}
        mask = {"attn_mask_type": "padding_causal", "attention_dropout": 0.0}
        module = te.DotProductAttention(HEADS, 128, qkv_format="thd", **mask)
        attend = functools.partial(module, **bounds, **lengths)
        name, shape = "TransformerEngine", (length, HEADS, 128)
    else:
        attention = torch.nn.functional.scaled_dot_product_attention
        attend = functools.partial(attention, is_causal=True)
        name, shape = "torch", (1, HEADS, length, 128)  # its kernels take four axes
    place: dict[str, Any] = {"device": device(), "dtype": torch.bfloat16, "requires_grad": True}
    parts = [torch.randn(shape, **place) for _ in range(3)]
    spent = seconds(lambda: attend(*parts).sum().backward())
    share = 3 * 2 * length**2 * 128 * HEADS / spent / H100.operations
    what, expected = f"attention of {length:,} tokens ({name})", H100.attention_share
    return at_least(what, share, expected, "of peak", "attention_share")


def _layer(tokens: int) -> Measurement:
    """TransformerEngine's MLP of a 32B layer under TP8, forward and backward."""
    if not hardware().has_transformer_engine:
        return Measurement("TransformerEngine MLP", "not measured: no GPU, or not installed")
    import transformer_engine.pytorch as te

    width, inner = (64, 96) if tokens < TOKENS else (5120, 3456)
    settings = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False}
    layer = te.LayerNormMLP(width, inner, params_dtype=torch.bfloat16, **settings)
    values = torch.randn(tokens, width, device=device(), dtype=torch.bfloat16, requires_grad=True)
    operations = 3 * 2 * tokens * 3 * width * inner
    share = operations / seconds(lambda: layer(values).sum().backward()) / H100.operations
    return at_least("TransformerEngine MLP of a 32B layer", share, MLP_SHARE, "of peak")
