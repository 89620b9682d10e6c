"""`token_stats` and `fused_loss` on one process against the float64 twin:
values, gradients, invariance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_stare.numerics import vocab_statistics
from megatron_stare.numerics.token_stats import VocabShard, token_stats
from tests import reference
from tests.numerics.head_cases import WAYS, example, head, relative, twin_gradients


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("tempered", ["one", "number", "per row"])
@pytest.mark.parametrize("workspace_bytes", [64 << 20, 1 << 12, 64])
def test_fp64_equals_the_twin(way: str, entropy: bool, tempered: str, workspace_bytes: int) -> None:
    data = example(23, 16, 120, 113, torch.float64)
    temperature = {"one": 1.0, "number": 0.7, "per row": data["temperature"]}[tempered]
    twin, want_hidden, want_weight = twin_gradients(data, 113, temperature, entropy)
    shard = VocabShard(data["weight"], None, 113)
    slope = data["entropy_slope"] if entropy else None
    loss, surprisal_N, entropy_N = head(
        way,
        data["hidden"],
        shard,
        data["target"],
        data["slope"],
        slope,
        temperature=temperature,
        workspace_bytes=workspace_bytes,
    )
    factor = 1.0 if way == "fused" else 3.0
    (factor * loss).backward()
    assert surprisal_N.dtype == entropy_N.dtype == torch.float64
    assert relative(surprisal_N, twin["surprisal"]) < 1e-12
    assert relative(entropy_N, twin["entropy"]) < 1e-12
    assert relative(data["hidden"].grad, factor * want_hidden) < 1e-12
    assert relative(data["weight"].grad, factor * want_weight) < 1e-12
    assert not data["weight"].grad[113:].any()


class FreshGraph(torch.autograd.Function):
    """A scalar function whose backward builds its graph again: gradcheck calls backward more often
    than two ways allow, and with other gradients than the fused loss does.
    """

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(*inputs)
        with torch.no_grad():
            return run(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            return (None, *(grad * one for one in torch.autograd.grad(ctx.run(*inputs), inputs)))


@pytest.mark.parametrize("way", WAYS)
def test_gradcheck(way: str) -> None:
    data = example(5, 4, 9, 8, torch.float64)

    def run(hidden: Tensor, weight: Tensor) -> Tensor:
        shard = VocabShard(weight, None, 8)
        options = {"temperature": data["temperature"], "workspace_bytes": 256}
        return head(
            way, hidden, shard, data["target"], data["slope"], data["entropy_slope"], **options
        )[0]

    inputs = (data["hidden"], data["weight"])
    assert torch.autograd.gradcheck(
        lambda *tensors: FreshGraph.apply(run, *tensors), inputs, atol=1e-9, rtol=1e-7
    )


@pytest.mark.parametrize("way", ["logits", "recompute"])
@pytest.mark.parametrize("workspace_bytes", [64 << 20, 1 << 10])
def test_collision_terms(way: str, workspace_bytes: int) -> None:
    data = example(23, 16, 120, 113, torch.float64)
    twin = reference.token_statistics(data["hidden"], data["weight"][:113], data["target"])
    stats = token_stats(
        data["hidden"],
        VocabShard(data["weight"], None, 113),
        data["target"],
        way=way,  # type: ignore[arg-type]
        workspace_bytes=workspace_bytes,
        collision=True,
    )
    for name, got in (("c", stats.c_N), ("sensitivity", stats.sensitivity_N)):
        assert relative(got, twin[name]) < 1e-12, name
        assert not got.requires_grad


@pytest.mark.parametrize("way", ["logits", "recompute"])
@pytest.mark.parametrize("kappa", [0.02, 0.5, 1.0])
def test_kept_mass(way: str, kappa: float) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        data = example(23, 16, 120, 113, dtype)
        weight, temperature = data["weight"], data["temperature"]
        data["target"][::2] = (data["hidden"] @ weight[:113].t()).argmax(1)[::2]
        want = reference.log_kept_mass(
            data["hidden"], weight[:113], data["target"], kappa, temperature
        )
        for workspace_bytes in (64 << 20, 1 << 10):
            stats = token_stats(
                data["hidden"],
                VocabShard(weight, None, 113),
                data["target"],
                temperature=temperature,
                way=way,  # type: ignore[arg-type]
                workspace_bytes=workspace_bytes,
                kappa=kappa,
            )
            assert stats.log_kept_mass_N is not None and not stats.log_kept_mass_N.requires_grad
            got = stats.log_kept_mass_N.tolist()
            assert got == pytest.approx(want, rel=tolerance, abs=tolerance)
            assert any(mass <= 0 for mass in got) and max(got) == math.inf, "both kinds of targets"


def test_kept_mass_by_hand() -> None:
    """Of the probabilities .5, .3, .15, .05 the share 0.3 of the largest keeps .5, .3 and .15, and
    the share 0.31 keeps two.
    """
    logits_NH = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64).log()
    shard = VocabShard(torch.eye(4, dtype=torch.float64), None, 4)
    found = token_stats(logits_NH, shard, torch.tensor([2]), kappa=0.31)
    assert float(found.log_kept_mass_N) == math.inf, "the target itself is not kept"
    for kappa, kept in ((0.31, 0.8), (0.2999, 0.95), (0.1, 1.0), (1.0, 0.5)):
        found = token_stats(logits_NH, shard, torch.zeros(1, dtype=torch.long), kappa=kappa)
        assert found.log_kept_mass_N is not None
        assert float(found.log_kept_mass_N) == pytest.approx(math.log(kept), abs=1e-14)
    with pytest.raises(ValueError, match="kappa must lie in"):
        token_stats(logits_NH, shard, torch.zeros(1, dtype=torch.long), kappa=1.5)


def test_golden_distribution() -> None:
    logits_NH = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64).log().repeat(4, 1)
    shard = VocabShard(torch.eye(4, dtype=torch.float64), None, 4)
    stats = token_stats(logits_NH, shard, torch.arange(4), collision=True)
    surprisals = [0.69314718, 1.2039728, 1.89711998, 2.99573227]
    assert stats.surprisal_N.tolist() == pytest.approx(surprisals, abs=1e-8)
    assert stats.entropy_N.tolist() == pytest.approx([1.1421200429883351] * 4, rel=1e-14)
    assert stats.c_N.tolist() == pytest.approx([-0.08505493781760444] * 4, rel=1e-13)
    assert stats.sensitivity_N.tolist() == pytest.approx(
        [-0.13943149, 0.10361077, 0.19830493, 0.17773555], abs=1e-8
    )
    probability = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    assert float((probability * stats.sensitivity_N).sum()) == pytest.approx(0.0, abs=1e-15)


@pytest.mark.parametrize(
    "rows", [1, 4, 12]
)  # few rows: where a BLAS may add the vocabulary up term by term
@pytest.mark.parametrize("way", WAYS)
def test_fp32_at_the_vocabulary_of_qwen(way: str, rows: int) -> None:
    data = example(rows, 32, 151_936, 151_665, torch.float32, scale=0.5)
    twin, want_hidden, want_weight = twin_gradients(data, 151_665, 1.0, entropy=True)
    shard = VocabShard(data["weight"], None, 151_665)
    slopes = (data["slope"].float(), data["entropy_slope"].float())
    loss, surprisal_N, entropy_N = head(
        way, data["hidden"], shard, data["target"], *slopes, workspace_bytes=8 << 20
    )
    loss.backward()
    torch.testing.assert_close(
        surprisal_N.detach().double(), twin["surprisal"].detach(), rtol=1e-5, atol=0
    )
    torch.testing.assert_close(
        entropy_N.detach().double(), twin["entropy"].detach(), rtol=1e-5, atol=0
    )
    assert relative(data["hidden"].grad, want_hidden) < 1e-5
    assert relative(data["weight"].grad, want_weight) < 1e-5


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("workspace_bytes", [64 << 20, 1 << 14])
def test_bf16_is_within_a_hundredth(way: str, workspace_bytes: int) -> None:
    data = example(40, 64, 1000, 990, torch.bfloat16, scale=0.1)
    twin, want_hidden, want_weight = twin_gradients(data, 990, 1.0, entropy=True)
    shard = VocabShard(data["weight"], None, 990)
    slopes = (data["slope"].float(), data["entropy_slope"].float())
    loss, surprisal_N, entropy_N = head(
        way, data["hidden"], shard, data["target"], *slopes, workspace_bytes=workspace_bytes
    )
    loss.backward()
    assert surprisal_N.dtype == torch.float32 and data["weight"].grad.dtype == torch.bfloat16
    assert relative(surprisal_N, twin["surprisal"]) < 1e-2
    assert relative(entropy_N, twin["entropy"]) < 1e-2
    assert relative(data["hidden"].grad, want_hidden) < 1e-2
    assert relative(data["weight"].grad, want_weight) < 1e-2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("workspace_bytes", [64 << 20, 1 << 14])
def test_fp32_logits_of_bf16_inputs_are_not_rounded(way: str, workspace_bytes: int) -> None:
    """Logits near 30, where neighbours in bf16 are 0.125 apart: each statistic is that of the bf16
    inputs, and the gradients are rounded once.
    """
    data = example(40, 64, 1000, 990, torch.bfloat16, scale=1.0)
    twin, want_hidden, want_weight = twin_gradients(data, 990, data["temperature"], entropy=True)
    slopes, errors = (data["slope"].float(), data["entropy_slope"].float()), {}
    for fp32_logits in (False, True):
        hidden, weight = (data[name].detach().requires_grad_() for name in ("hidden", "weight"))
        loss, surprisal_N, entropy_N = head(
            way,
            hidden,
            VocabShard(weight, None, 990, fp32_logits),
            data["target"],
            *slopes,
            temperature=data["temperature"],
            workspace_bytes=workspace_bytes,
        )
        loss.backward()
        errors[fp32_logits] = [
            float((surprisal_N.detach().double() - twin["surprisal"].detach()).abs().max()),
            float((entropy_N.detach().double() - twin["entropy"].detach()).abs().max()),
            relative(hidden.grad, want_hidden),
            relative(weight.grad, want_weight),
        ]
        assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    assert max(errors[True][:2]) < 5e-5, "nats"
    assert errors[False][0] > 1e-2, "bf16 logits do round here"
    assert max(errors[True][2:]) < 5e-3


@pytest.mark.parametrize("way", WAYS)
def test_chunk_size_and_row_order_do_not_matter(way: str) -> None:
    data = example(61, 16, 400, 391, torch.float32)
    order = torch.randperm(61, generator=torch.Generator().manual_seed(3))
    results = []
    for rows in (torch.arange(61), order):
        for workspace_bytes in (64 << 20, 40_000, 3_000):
            hidden = data["hidden"].detach()[rows].requires_grad_()
            weight = data["weight"].detach().clone().requires_grad_()
            loss, surprisal_N, entropy_N = head(
                way,
                hidden,
                VocabShard(weight, None, 391),
                data["target"][rows],
                data["slope"].float()[rows],
                data["entropy_slope"].float()[rows],
                workspace_bytes=workspace_bytes,
            )
            loss.backward()
            back = torch.argsort(rows)
            results.append((surprisal_N[back], entropy_N[back], hidden.grad[back], weight.grad))
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert relative(got, want) < 1e-6


@pytest.mark.parametrize("way", WAYS)
def test_same_call_gives_the_same_bits(way: str) -> None:
    data = example(30, 16, 400, 391, torch.float32)
    runs = []
    for _ in range(2):
        hidden, weight = (
            data[name].detach().clone().requires_grad_() for name in ("hidden", "weight")
        )
        loss, surprisal_N, _ = head(
            way,
            hidden,
            VocabShard(weight, None, 391),
            data["target"],
            data["slope"].float(),
            None,
            workspace_bytes=9999,
        )
        loss.backward()
        runs.append((surprisal_N.detach(), hidden.grad, weight.grad))
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_without_rows_is_computed(way: str) -> None:
    data = example(0, 8, 20, 19, torch.float32)
    loss, surprisal_N, entropy_N = head(
        way,
        data["hidden"],
        VocabShard(data["weight"], None, 19),
        data["target"],
        data["slope"].float(),
        None,
    )
    loss.backward()
    assert loss.item() == 0.0 and surprisal_N.shape == entropy_N.shape == (0,)
    assert data["hidden"].grad.shape == (0, 8)
    assert data["weight"].grad.shape == (20, 8) and not data["weight"].grad.any()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("workspace_bytes", [64 << 20, 6_000])
def test_rows_without_gradient_are_skipped(
    way: str, workspace_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = example(23, 16, 120, 113, torch.float64)
    data["slope"][torch.tensor([0, 1, 5, 6, 7, 8, 9, 15, 22])] = 0.0
    written = []
    original: Callable[..., None] = vocab_statistics.write_gradient_

    def counting(tile_nv: Tensor, *arguments: Any) -> None:
        written.append(tile_nv.numel())
        original(tile_nv, *arguments)

    monkeypatch.setattr(vocab_statistics, "write_gradient_", counting)
    _, want_hidden, want_weight = twin_gradients(data, 113, 1.0, entropy=False)
    shard = VocabShard(data["weight"], None, 113)
    loss, _, _ = head(
        way,
        data["hidden"],
        shard,
        data["target"],
        data["slope"],
        None,
        workspace_bytes=workspace_bytes,
    )
    loss.backward()
    assert sum(written) == 14 * 113
    assert relative(data["hidden"].grad, want_hidden) < 1e-12
    assert relative(data["weight"].grad, want_weight) < 1e-12


@pytest.mark.parametrize("way", WAYS)
def test_all_rows_without_gradient(way: str) -> None:
    data = example(6, 8, 20, 19, torch.float32)
    shard = VocabShard(data["weight"], None, 19)
    head(way, data["hidden"], shard, data["target"], torch.zeros(6), None)[0].backward()
    assert not data["hidden"].grad.any() and not data["weight"].grad.any()


@pytest.mark.parametrize("way", WAYS)
def test_only_tensors_that_require_a_gradient_get_one(way: str) -> None:
    for frozen in ("hidden", "weight"):
        data = example(6, 8, 20, 19, torch.float32)
        data[frozen].requires_grad_(False)
        shard = VocabShard(data["weight"], None, 19)
        head(way, data["hidden"], shard, data["target"], data["slope"].float(), None)[0].backward()
        assert (data["hidden"].grad is None) == (frozen == "hidden")
        assert (data["weight"].grad is None) == (frozen == "weight")


@pytest.mark.parametrize("way", WAYS)
def test_without_gradients_only_statistics_are_made(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocab_statistics, "write_gradient_", None)
    data = example(9, 8, 20, 19, torch.float64)
    twin = reference.token_statistics(data["hidden"], data["weight"][:19], data["target"])
    with torch.no_grad():
        shard = VocabShard(data["weight"], None, 19)
        loss, surprisal_N, entropy_N = head(
            way, data["hidden"], shard, data["target"], data["slope"], None
        )
    assert not loss.requires_grad and not surprisal_N.requires_grad
    assert relative(entropy_N, twin["entropy"]) < 1e-12
    assert loss.item() == pytest.approx((twin["surprisal"] * data["slope"]).sum().item(), rel=1e-12)


def test_a_masked_logit_of_minus_infinity_is_safe() -> None:
    data = example(7, 8, 20, 20, torch.float64)
    hidden = torch.cat([data["hidden"].detach(), torch.ones(7, 1)], dim=1)
    weight = torch.cat([data["weight"].detach(), torch.zeros(20, 1)], dim=1)
    weight[[3, 11, 19], 8] = -math.inf
    target_N = torch.tensor([0, 1, 2, 3, 4, 5, 6])
    finite = [row for row in range(20) if row not in (3, 11, 19)]
    twin = reference.token_statistics(
        data["hidden"].detach(),
        data["weight"].detach()[finite],
        torch.tensor([0, 1, 2, 0, 3, 4, 5]),
    )
    for workspace_bytes in (64 << 20, 96):
        stats = token_stats(
            hidden, VocabShard(weight, None, 20), target_N, workspace_bytes=workspace_bytes
        )
        assert float(stats.surprisal_N[3]) == math.inf
        others = torch.tensor([0, 1, 2, 4, 5, 6])
        assert relative(stats.surprisal_N[others], twin["surprisal"][others]) < 1e-12
        assert relative(stats.entropy_N, twin["entropy"]) < 1e-12
