"""K1: the kernels of this project at the sizes of real runs, against float64.

Shape legend: N rows, n sampled rows, H hidden width, V vocabulary, v sampled columns.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_stare.commands.gpuday.results import Day, Measurement, holds, within
from megatron_stare.commands.gpuday.stages import checked, checkout, tool
from megatron_stare.config import PolicyConfig
from megatron_stare.numerics.fused_loss import fused_loss
from megatron_stare.numerics.hashes import tile_total
from megatron_stare.numerics.token_stats import VocabShard, token_stats
from megatron_stare.numerics.weight_gradient import add_product_
from megatron_stare.policy.tuning import hardware, workspace_bytes

# Rows, hidden width, vocabulary: a rank of the 32B recipes under TP8, and one whole head with
# 34,816 * 151,936 = 5.3e9 logits, more than a 32-bit index reaches.
SIZES = ((8704, 5120, 18992), (34816, 4096, 151936))
SMALL_SIZES = ((64, 32, 512),)
SAMPLED = 256
ROUNDS = 10
MOST_NATS, MOST_RELATIVE = 0.2, 0.03  # logits are bf16: half a step of 2^-4 for logits up to 16


def device() -> torch.device:
    """The first GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def seconds(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """The median over `rounds`, after two that warm up."""
    found = []
    for number in range(rounds + 2):
        synchronize()
        begin = time.perf_counter()
        work()
        synchronize()
        if number > 1:
            found.append(time.perf_counter() - begin)
    return max(statistics.median(found), 1e-9)


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_bytes(work: Callable[[], object]) -> float:
    """The bytes that torch's allocator held in addition at its peak; 0 on a CPU."""
    if not torch.cuda.is_available():
        work()
        return 0.0
    synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    synchronize()
    return float(torch.cuda.max_memory_allocated() - before)


def relative_error(found: Tensor, reference: Tensor) -> float:
    """|found - reference| / |reference|, Euclidean norms in float64; NaN if one is not finite."""
    expected = reference.double()
    return float((found.double() - expected).norm() / expected.norm())


@dataclass(frozen=True)
class HeadSample:
    """Random inputs of one head in bf16."""

    hidden_NH: Tensor
    weight_VH: Tensor
    target_N: Tensor
    weight_grad_VH: Tensor  # fp32

    @classmethod
    def make(cls, rows: int, width: int, vocabulary: int) -> HeadSample:
        """Logits are standard normal."""
        generator = torch.Generator(device()).manual_seed(0)
        place: dict[str, Any] = {"generator": generator, "device": device()}
        hidden_NH = torch.randn(rows, width, dtype=torch.bfloat16, **place)
        weight_VH = torch.randn(vocabulary, width, dtype=torch.bfloat16, **place) * width**-0.5
        target_N = torch.randint(0, vocabulary, (rows,), **place)
        weight_grad_VH = torch.zeros(vocabulary, width, device=device())
        weight_VH.main_grad = weight_grad_VH
        return cls(hidden_NH.requires_grad_(), weight_VH.requires_grad_(), target_N, weight_grad_VH)

    @property
    def shard(self) -> VocabShard:
        return VocabShard(self.weight_VH, None, self.weight_VH.shape[0])

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
            workspace_bytes=run_workspace(),
        )
        (hidden_grad_NH,) = torch.autograd.grad(loss, self.hidden_NH)
        return surprisal_N, entropy_N, hidden_grad_NH, self.weight_grad_VH


def run_workspace() -> int:
    """Bytes for a chunk of logits in a run on this machine with the default settings."""
    return workspace_bytes(PolicyConfig(), hardware().memory_bytes)


def run(day: Day) -> Iterator[Measurement]:
    """The tests marked `gpu`, then each kernel at real sizes."""
    yield from _tests()
    for size in SMALL_SIZES if day.rehearsal else SIZES:
        yield from _head(*size)
    yield from _products(64 if day.rehearsal else 8704)
    yield from _hashes(20_000 if day.rehearsal else 500_000_003)
    yield from _sanitized()


def _tests() -> Iterator[Measurement]:
    root = checkout()
    if root is None:
        yield Measurement("tests marked gpu", "not run: the checkout has no tests", "", "", "WARN")
        return
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    try:
        said = checked([*command, "--rootdir", str(root), str(root / "tests")])
    except RuntimeError as error:  # the rows after this one still say where it goes wrong
        yield Measurement("tests marked gpu", str(error), "", "", "FAIL")
        return
    yield Measurement("tests marked gpu", said.strip().splitlines()[-1].strip("= "), "", "", "OK")


def _head(rows: int, width: int, vocabulary: int) -> Iterator[Measurement]:
    name, head = f"head {rows:,} x {vocabulary:,}", HeadSample.make(rows, width, vocabulary)
    surprisal_N, entropy_N, hidden_grad_NH, weight_grad_VH = head.step()
    some = torch.linspace(0, rows - 1, min(rows, SAMPLED), device=device()).long()
    hidden_nH, weight_VH = head.hidden_NH.detach()[some].double(), head.weight_VH.detach()
    log_nV = torch.log_softmax(hidden_nH @ weight_VH.double().t(), 1)
    target_n = head.target_N[some].unsqueeze(1)
    expected_n = -log_nV.gather(1, target_n).squeeze(1)
    yield within(f"{name}: surprisal", _most(surprisal_N[some] - expected_n), MOST_NATS, "nats")
    expected_n = -(log_nV.exp() * log_nV).sum(1)
    yield within(f"{name}: entropy", _most(entropy_N[some] - expected_n), MOST_NATS, "nats")
    slope_nV = log_nV.exp_().scatter_add_(
        1, target_n, torch.full_like(target_n, -1.0, dtype=log_nV.dtype)
    )
    expected_nH = slope_nV @ weight_VH.double() / rows
    error = relative_error(hidden_grad_NH[some], expected_nH)
    yield within(f"{name}: gradient of hidden states", error, MOST_RELATIVE)
    del log_nV, slope_nV
    columns = torch.linspace(0, vocabulary - 1, 64, device=device()).long()
    error = relative_error(weight_grad_VH[columns], _weight_gradient(head, surprisal_N, columns))
    yield within(f"{name}: gradient of the weight", error, MOST_RELATIVE)
    with torch.no_grad():
        stats = token_stats(head.hidden_NH, head.shard, head.target_N, collision=True)
    yield within(
        f"{name}: statistics as the loss", _most(stats.surprisal_N - surprisal_N), 1e-4, "nats"
    )
    kept = [value.clone() for value in (surprisal_N, hidden_grad_NH, weight_grad_VH)]
    again = head.step()
    same = all(torch.equal(a, b) for a, b in zip(kept, (again[0], *again[2:]), strict=True))
    yield holds(f"{name}: bits of two runs are equal", same, otherwise="WARN")


def _weight_gradient(head: HeadSample, surprisal_N: Tensor, columns: Tensor) -> Tensor:
    """Rows `columns` of the weight's gradient in float64. Of the forward pass it takes only
    surprisal_N: the logarithm of a row's sum is that plus the target's logit.
    """
    hidden_NH, weight_VH = head.hidden_NH.detach(), head.weight_VH.detach()
    sum_vH = torch.zeros(columns.numel(), hidden_NH.shape[1], dtype=torch.float64, device=device())
    for rows in torch.arange(head.target_N.numel(), device=device()).split(4096):
        hidden_nH, target_n = hidden_NH[rows].double(), head.target_N[rows]
        logit_n = (hidden_nH * weight_VH[target_n].double()).sum(1)
        log_n = surprisal_N[rows].double() + logit_n
        slope_nv = (hidden_nH @ weight_VH[columns].double().t() - log_n.unsqueeze(1)).exp()
        slope_nv -= (target_n.unsqueeze(1) == columns).double()
        sum_vH += slope_nv.t() @ hidden_nH
    return sum_vH / head.target_N.numel()


def _products(summands: int) -> Iterator[Measurement]:
    """Products of bf16 that accumulate in fp32, as gradients of the output weight do."""
    generator = torch.Generator(device()).manual_seed(1)
    place: dict[str, Any] = {"generator": generator, "device": device(), "dtype": torch.bfloat16}
    left, right = torch.randn(256, summands, **place), torch.randn(summands, 256, **place)
    start = torch.randn(256, 256, generator=generator, device=device())
    found = start.clone()
    add_product_(found, left, right, beta=1.0)
    expected = start.double() + left.double() @ right.double()
    yield within(f"fp32 sum of {summands:,} bf16 products", relative_error(found, expected), 1e-5)


def _hashes(elements: int) -> Iterator[Measurement]:
    """The hash that SGLang's servers compute of a weight, by the kernel and by torch on the CPU."""
    words = torch.arange(elements, dtype=torch.int32) * 2654435 + 7
    found = int(tile_total(words.to(device())))
    yield holds(f"tile hash of {elements:,} words", found == int(tile_total(words)))


def _sanitized() -> Iterator[Measurement]:
    program = tool("compute-sanitizer")
    if not program:
        yield Measurement("compute-sanitizer", "not run: it is not installed (CUDA toolkit)")
        return
    small = f"from {__name__} import HeadSample; HeadSample.make(*{SMALL_SIZES[0]}).step()"
    command = [program, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c", small]
    said = checked(command)
    summary = [line for line in said.splitlines() if "ERROR SUMMARY" in line]
    yield Measurement(
        "compute-sanitizer memcheck", summary[-1].strip("= ") if summary else "no summary"
    )


def _most(difference: Tensor) -> float:
    """The largest absolute difference; NaN if there is one."""
    return float(difference.abs().max())
