"""The head at its edges: Megatron's main_grad, one-shot gradients, bad input, peak memory."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_stare.numerics.fused_loss import fused_loss
from megatron_stare.numerics.token_stats import VocabShard, token_stats
from tests.numerics.head_cases import WAYS, example, head, relative, twin_gradients
from tests.paths import ROOT

# ---- the weight's gradient under Megatron's convention ----


def megatron_weight(data: dict[str, Tensor], flagged: bool, tied: bool) -> Tensor:
    weight = data["weight"]
    weight.main_grad = torch.ones(weight.shape, dtype=torch.float32)
    if flagged:
        weight.grad_added_to_main_grad = False
    if tied:
        weight.zero_out_wgrad = True
    return weight


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("workspace_bytes", [64 << 20, 1 << 14])
def test_main_grad_is_added_to(way: str, dtype: torch.dtype, workspace_bytes: int) -> None:
    data = example(33, 32, 300, 290, dtype, scale=0.2)
    _, want_hidden, want_weight = twin_gradients(data, 290, 1.0, entropy=False)
    weight = megatron_weight(data, flagged=True, tied=False)
    loss, _, _ = head(
        way,
        data["hidden"],
        VocabShard(weight, None, 290),
        data["target"],
        data["slope"].float(),
        None,
        workspace_bytes=workspace_bytes,
    )
    loss.backward()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert weight.grad_added_to_main_grad and weight.grad.shape == weight.shape
    assert relative(weight.main_grad - 1.0, want_weight) < tolerance
    assert relative(data["hidden"].grad, want_hidden) < tolerance


@pytest.mark.parametrize("way", WAYS)
def test_tied_and_unflagged_weights(way: str) -> None:
    data = example(9, 8, 20, 19, torch.float32)
    weight = megatron_weight(data, flagged=True, tied=True)
    head(
        way,
        data["hidden"],
        VocabShard(weight, None, 19),
        data["target"],
        data["slope"].float(),
        None,
    )[0].backward()
    assert not weight.grad.any(), (
        "Megatron adds a tied weight's dummy to main_grad: it must be zeros"
    )

    data = example(9, 8, 20, 19, torch.float32)
    weight = megatron_weight(data, flagged=False, tied=False)
    head(
        way,
        data["hidden"],
        VocabShard(weight, None, 19),
        data["target"],
        data["slope"].float(),
        None,
    )[0].backward()
    assert weight.grad is None and (weight.main_grad[:19] != 1.0).any()


def test_fused_loss_refuses_an_unexpected_gradient_and_a_second_backward() -> None:
    data = example(9, 8, 20, 19, torch.float32)
    shard = VocabShard(data["weight"], None, 19)
    loss, _, _ = head("fused", data["hidden"], shard, data["target"], data["slope"].float(), None)
    with pytest.raises(ValueError, match=r"its backward received 0.5; .* already made for 1"):
        (0.5 * loss).backward()
    for way in ("logits", "fused"):
        loss, _, _ = head(way, data["hidden"], shard, data["target"], data["slope"].float(), None)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="no second backward"):
            loss.backward()


def test_fused_loss_refuses_a_reduced_loss() -> None:
    data = example(9, 8, 20, 19, torch.float32)
    shard = VocabShard(data["weight"], None, 19)
    with pytest.raises(ValueError, match="one loss per token"):
        fused_loss(
            data["hidden"], shard, data["target"], lambda surprisal, entropy, rows: surprisal.sum()
        )


# ---- bad input ----


def bad_call(**changes: Any) -> Callable[[], Any]:
    data: dict[str, Any] = {
        **example(6, 8, 20, 19, torch.float32),
        "vocab_size": 19,
        "temperature": 1.0,
    } | changes
    shard = VocabShard(data["weight"], None, data["vocab_size"])
    return lambda: token_stats(
        data["hidden"], shard, data["target"], temperature=data["temperature"]
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"target": torch.tensor([0, 1, 2, 19, 4, 5])},
            r"rank 0, row 3: target 19 is outside the vocabulary \[0, 19\)",
        ),
        ({"target": torch.tensor([0, -1, 2, 3, 4, 5])}, "rank 0, row 1: target -1 is outside"),
        ({"target": torch.arange(5)}, "size of 5"),
        ({"target": torch.arange(6).int()}, "target must be int64"),
        ({"temperature": 0.0}, "rank 0, row 0: temperature 0 is not positive"),
        (
            {"temperature": torch.tensor([1, 1, 1, 1, -2.5, 1])},
            "rank 0, row 4: temperature -2.5 is not positive",
        ),
        ({"temperature": math.nan}, "temperature nan is not positive"),
        ({"vocab_size": 21}, "vocab_size 21 is not in"),
        ({"hidden": torch.zeros(6, 9)}, "hidden must be"),
        ({"hidden": torch.zeros(6, 8).bfloat16()}, "share one floating-point dtype"),
    ],
)
def test_bad_input_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bad_call(**changes)()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("way", ["logits", "recompute", "fused"])
def test_logits_that_are_not_finite_leave_such_statistics(value: float, way: str) -> None:
    hidden, weight = torch.full((6, 8), 0.1), torch.ones(20, 8)
    hidden[2:4] = value
    shard, target = VocabShard(weight, None, 20), torch.arange(6)
    if way == "fused":
        hidden.requires_grad_()
        _, surprisal, entropy, _ = fused_loss(
            hidden, shard, target, lambda surprisal, entropy, rows: surprisal
        )
    else:
        found = token_stats(hidden, shard, target, way=way)  # type: ignore[arg-type]
        surprisal, entropy = found.surprisal_N, found.entropy_N
    sound = torch.isfinite(surprisal) & torch.isfinite(entropy)
    assert sound.tolist() == [True, True, False, False, True, True]


def test_wrong_requests_are_named() -> None:
    data = example(6, 8, 20, 19, torch.float32)
    shard = VocabShard(data["weight"], None, 19)
    with pytest.raises(ValueError, match="'logits' or 'recompute'"):
        token_stats(data["hidden"], shard, data["target"], way="whole")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="collision=True"):
        _ = token_stats(data["hidden"], shard, data["target"]).sensitivity_N


# ---- memory ----

MEMORY_SCRIPT = """
import sys, torch
from megatron_stare.numerics.fused_loss import fused_loss
from megatron_stare.numerics.token_stats import VocabShard, token_stats
torch.set_num_threads(1)
way, rows, width, columns, workspace = sys.argv[1], 2048, 64, 16384, 16 << 20

def status(name):
    lines = open("/proc/self/status").readlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

def step(rows):
    hidden = torch.randn(rows, width, requires_grad=True)
    weight = torch.randn(columns, width, requires_grad=True)
    shard = VocabShard(weight, None, columns)
    target = torch.randint(0, columns, (rows,))
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    if way == "fused":
        loss, *_ = fused_loss(hidden, shard, target, lambda s, e, r: s + e,
                                needs_entropy_grad=True, workspace_bytes=workspace)
    else:
        stats = token_stats(hidden, shard, target, way=way, workspace_bytes=workspace)
        loss = (stats.surprisal_N + stats.entropy_N).sum()
    loss.backward()
    gradients = 4 * (hidden.numel() + weight.numel())
    return status("VmHWM") - before - gradients - workspace - 64 * rows

step(8)
print(step(rows))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak counter")
@pytest.mark.parametrize("way", ["recompute", "fused"])
def test_peak_memory_is_one_workspace_and_64_bytes_per_token(way: str) -> None:
    # A fixed threshold makes glibc map every tensor by itself, so that freed memory leaves the
    # counters at once.
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    }
    command = [sys.executable, "-c", MEMORY_SCRIPT, way]
    finished = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    excess = int(finished.stdout)
    full_logits = 4 * 2048 * 16384
    assert excess < 2 << 20, (
        f"{excess / 2**20:.1f} MiB beyond the promise; full logits would be {full_logits >> 20}"
    )
