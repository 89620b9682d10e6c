"""The head on a vocabulary sharded over 1, 2 and 4 real ranks,
with and without sequence parallelism: one spawn.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stare.numerics.fused_loss import fused_loss
from megatron_stare.numerics.token_stats import VocabShard, token_stats
from tests import reference
from tests.distributed import run_distributed
from tests.numerics.head_cases import WAYS, example, head, relative, twin_gradients

ROWS, WIDTH, PADDED, REAL = 24, 16, 80, 53
"""On four ranks: shards of 20 rows,
the third holds 13 real ones and the fourth nothing but padding.
"""

WORKSPACES = (64 << 20, 2_000)


class GatherRows(torch.autograd.Function):
    """Calls of a sequence-parallel caller: all-gather the rows, reduce-scatter their gradient."""

    @staticmethod
    def forward(ctx: Any, hidden_nH: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.rows = group, hidden_nH.shape[0]
        pieces = [torch.empty_like(hidden_nH) for _ in range(dist.get_world_size(group))]
        dist.all_gather(pieces, hidden_nH.contiguous(), group=group)
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx: Any, grad_NH: Tensor) -> tuple[Tensor, None]:
        total_NH = grad_NH.clone()
        dist.all_reduce(total_NH, group=ctx.group)
        first = dist.get_rank(ctx.group) * ctx.rows
        return total_NH[first : first + ctx.rows], None


class Counting:
    """Counts collectives by name while it is entered."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __enter__(self) -> Counting:
        self.originals = {name: getattr(dist, name) for name in ("all_gather", "all_reduce")}
        for name, original in self.originals.items():
            setattr(dist, name, self._counted(name, original))
        return self

    def _counted(self, name: str, original: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append(name)
            return original(*arguments, **options)

        return call

    def __exit__(self, *_: Any) -> None:
        for name, original in self.originals.items():
            setattr(dist, name, original)


def on_ranks(rank: int, world_size: int) -> dict[Any, Any]:
    groups = {size: dist.new_group(list(range(size))) for size in (1, 2, 4)}
    found: dict[Any, Any] = {}
    for size, group in groups.items():
        if rank >= size:
            continue
        for dtype in (torch.float64, torch.float32):
            for way in WAYS:
                for workspace_bytes in WORKSPACES:
                    for sequence_parallel in (False, True):
                        key = (size, dtype, way, workspace_bytes, sequence_parallel)
                        found[key] = _one_run(
                            rank, size, group, dtype, way, workspace_bytes, sequence_parallel
                        )
                    key = (size, torch.bfloat16, way, workspace_bytes)
                    found[key] = _one_run(rank, size, group, torch.bfloat16, *key[2:], False, True)
        found["collision", size] = _collision(rank, size, group)
        for dtype in (torch.float64, torch.float32):
            found["variance", size, dtype] = _variances(rank, size, group, dtype)
        found["empty", size] = [_empty(rank, size, group, way) for way in WAYS]
    found["collectives"] = {way: _collectives(rank, groups[4], way) for way in WAYS}
    found["errors"] = [_error(rank, groups[4], fault) for fault in range(4)]
    return found


def _shard(
    data: dict[str, Tensor], rank: int, size: int, group: dist.ProcessGroup, fp32: bool = False
) -> VocabShard:
    rows = PADDED // size
    weight = data["weight"].detach()[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    return VocabShard(weight, group, REAL, fp32)


def _one_run(
    rank: int,
    size: int,
    group: dist.ProcessGroup,
    dtype: torch.dtype,
    way: str,
    workspace_bytes: int,
    sequence_parallel: bool,
    fp32_logits: bool = False,
) -> dict[str, Tensor]:
    data = example(ROWS, WIDTH, PADDED, REAL, dtype)
    shard = _shard(data, rank, size, group, fp32_logits)
    hidden = data["hidden"].detach().clone()
    surprisals = torch.float64 if dtype == torch.float64 else torch.float32
    if sequence_parallel:
        hidden = hidden.chunk(size)[rank].clone()
    hidden.requires_grad_()
    loss, surprisal_N, entropy_N = head(
        way,
        GatherRows.apply(hidden, group) if sequence_parallel else hidden,
        shard,
        data["target"],
        data["slope"].to(surprisals),
        data["entropy_slope"].to(surprisals),
        temperature=data["temperature"],
        workspace_bytes=workspace_bytes,
        reduce_hidden_grad=not sequence_parallel,
    )
    loss.backward()
    return {
        "surprisal": surprisal_N.detach(),
        "entropy": entropy_N.detach(),
        "hidden": hidden.grad,
        "weight": shard.weight_VH.grad,
    }


def _collision(rank: int, size: int, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    data = example(ROWS, WIDTH, PADDED, REAL, torch.float64)
    stats = token_stats(
        data["hidden"],
        _shard(data, rank, size, group),
        data["target"],
        collision=True,
        kappa=0.1,
        workspace_bytes=2_000,
    )
    assert stats.c_N is not None
    assert stats.log_kept_mass_N is not None
    return stats.c_N, stats.log_kept_mass_N


def _variances(
    rank: int, size: int, group: dist.ProcessGroup, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Var of the surprisal by every way of the head, with and without collision terms."""
    data = example(ROWS, WIDTH, PADDED, REAL, dtype)
    call = (data["hidden"], _shard(data, rank, size, group), data["target"])
    options: dict[str, Any] = {"temperature": data["temperature"], "workspace_bytes": 2_000}
    return {
        "fused": fused_loss(*call, lambda s, h, rows: s, **options)[3],
        "logits": token_stats(*call, way="logits", **options).variance_N,
        "recompute": token_stats(*call, way="recompute", **options).variance_N,
        "collision": token_stats(*call, collision=True, **options).variance_N,
    }


def _empty(rank: int, size: int, group: dist.ProcessGroup, way: str) -> tuple[int, float]:
    data = example(0, WIDTH, PADDED, REAL, torch.float32)
    shard = _shard(data, rank, size, group)
    loss, surprisal_N, _ = head(
        way, data["hidden"], shard, data["target"], data["slope"].float(), None
    )
    loss.backward()
    return surprisal_N.numel(), float(shard.weight_VH.grad.abs().sum())


def _collectives(rank: int, group: dist.ProcessGroup, way: str) -> tuple[list[str], list[str]]:
    data = example(ROWS, WIDTH, PADDED, REAL, torch.float32)
    shard = _shard(data, rank, 4, group)
    with Counting() as forward:
        loss, _, _ = head(
            way,
            data["hidden"],
            shard,
            data["target"],
            data["slope"].float(),
            data["entropy_slope"].float(),
            workspace_bytes=2 * 4 * (PADDED // 4) * 12,
        )
    with Counting() as backward:
        loss.backward()
    return forward.calls, backward.calls


def _error(rank: int, group: dist.ProcessGroup, fault: int) -> str:
    data = example(ROWS, WIDTH, PADDED, REAL, torch.float32)
    shard = _shard(data, rank, 4, group)
    hidden, target, temperature = data["hidden"], data["target"], torch.ones(ROWS)
    if fault == 0 and rank == 3:
        target = target.clone()
        target[7] = 53
    elif fault == 1 and rank == 2:
        shard = VocabShard(torch.zeros(19, WIDTH), group, REAL)
    elif fault == 2 and rank == 1:
        hidden, target, temperature = hidden[:20], target[:20], temperature[:20]
    elif fault == 3 and rank == 2:
        target = (target + 1) % REAL
    try:
        token_stats(hidden, shard, target, temperature=temperature)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Any]]:
    return run_distributed(on_ranks, 4)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_every_sharding_equals_the_twin(
    ranks: list[dict[Any, Any]],
    way: str,
    sequence_parallel: bool,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    data = example(ROWS, WIDTH, PADDED, REAL, dtype)
    twin, want_hidden, want_weight = twin_gradients(data, REAL, data["temperature"], entropy=True)
    for size in (1, 2, 4):
        for workspace_bytes in WORKSPACES:
            runs = [
                rank[size, dtype, way, workspace_bytes, sequence_parallel] for rank in ranks[:size]
            ]
            for run in runs:
                assert torch.equal(run["surprisal"], runs[0]["surprisal"])
                assert torch.equal(run["entropy"], runs[0]["entropy"])
                assert relative(run["surprisal"], twin["surprisal"]) < tolerance
                assert relative(run["entropy"], twin["entropy"]) < tolerance
                if not sequence_parallel:
                    assert relative(run["hidden"], want_hidden) < tolerance
            if sequence_parallel:
                assert relative(torch.cat([run["hidden"] for run in runs]), want_hidden) < tolerance
            assert relative(torch.cat([run["weight"] for run in runs]), want_weight) < tolerance


@pytest.mark.parametrize("way", WAYS)
def test_shardings_agree_among_themselves(ranks: list[dict[Any, Any]], way: str) -> None:
    def whole(size: int, name: str) -> Tensor:
        runs = [rank[size, torch.float32, way, WORKSPACES[0], False] for rank in ranks[:size]]
        return torch.cat([run[name] for run in runs]) if name == "weight" else runs[0][name]

    for name in ("surprisal", "entropy", "hidden", "weight"):
        for size in (2, 4):
            assert relative(whole(size, name), whole(1, name)) < 1e-6, (name, size)


@pytest.mark.parametrize("way", WAYS)
def test_fp32_logits_of_bf16_inputs_are_the_same_on_every_sharding(
    ranks: list[dict[Any, Any]], way: str
) -> None:
    data = example(ROWS, WIDTH, PADDED, REAL, torch.bfloat16)
    twin, want_hidden, want_weight = twin_gradients(data, REAL, data["temperature"], entropy=True)
    for size in (1, 2, 4):
        for workspace_bytes in WORKSPACES:
            runs = [rank[size, torch.bfloat16, way, workspace_bytes] for rank in ranks[:size]]
            for run in runs:
                assert relative(run["surprisal"], twin["surprisal"]) < 2e-6
                assert relative(run["entropy"], twin["entropy"]) < 2e-6
                assert relative(run["hidden"], want_hidden) < 1e-2
            assert relative(torch.cat([run["weight"] for run in runs]), want_weight) < 1e-2


def test_collision_terms_are_the_same_on_every_sharding(ranks: list[dict[Any, Any]]) -> None:
    data = example(ROWS, WIDTH, PADDED, REAL, torch.float64)
    twin, _, _ = twin_gradients(data, REAL, 1.0, entropy=False)
    kept = reference.log_kept_mass(data["hidden"], data["weight"][:REAL], data["target"], 0.1)
    for size in (1, 2, 4):
        for rank in ranks[:size]:
            c_N, kept_N = rank["collision", size]
            assert kept_N.tolist() == pytest.approx(kept, rel=1e-12, abs=1e-13)
            assert relative(c_N, twin["c"]) < 1e-12


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_variance_is_the_same_on_every_sharding(
    ranks: list[dict[Any, Any]], dtype: torch.dtype, tolerance: float
) -> None:
    data = example(ROWS, WIDTH, PADDED, REAL, dtype)
    arguments = (data["hidden"], data["weight"][:REAL], data["target"], data["temperature"])
    want_N = reference.token_statistics(*arguments)["variance"]
    for size in (1, 2, 4):
        for rank in ranks[:size]:
            for way, variance_N in rank["variance", size, dtype].items():
                assert relative(variance_N, want_N) < tolerance, (size, way)


def test_no_rows_on_any_sharding(ranks: list[dict[Any, Any]]) -> None:
    for size in (1, 2, 4):
        for rank in ranks[:size]:
            assert rank["empty", size] == [(0, 0.0)] * 3


def test_collectives(ranks: list[dict[Any, Any]]) -> None:
    """One handshake and one gather per block of rows in the forward;
    over the vocabulary nothing in the backward.
    """
    for rank in ranks:
        found = rank["collectives"]
        assert found["logits"] == (["all_gather"] * 2, ["all_reduce"])
        assert found["recompute"] == (["all_gather"] * 3, ["all_reduce"])
        assert found["fused"] == (["all_gather"] * 3 + ["all_reduce"], [])


def test_every_rank_raises_the_same_error(ranks: list[dict[Any, Any]]) -> None:
    patterns = [
        "vocabulary rank 3, row 7: target 53 is outside the vocabulary [0, 53)",
        "rows of weight is 19 on vocabulary rank 2 but 20 on rank 0",
        "rows of hidden is 20 on vocabulary rank 1 but 24 on rank 0",
        "target checksum",
    ]
    for fault, pattern in enumerate(patterns):
        messages = {rank["errors"][fault] for rank in ranks}
        assert len(messages) == 1 and pattern in messages.pop()
