"""STARE: how many tokens are chosen, which, and what they weigh; on two ranks as on one."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stare.config import LossConfig
from megatron_stare.losses import find_objective
from megatron_stare.losses.stare import chosen_count, select_top, token_weights
from megatron_stare.numerics.selection import Across
from tests.distributed import run_distributed
from tests.losses import reference_losses
from tests.losses.batches import ALONE, batch_of, random_tokens, run

plan_stare = find_objective("stare").plan


def test_counts_equal_the_golden_ones():
    assert [chosen_count(n, 0.1) for n in (1, 9, 10, 11, 1001)] == [1, 1, 1, 2, 101]


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 2_000_000), st.integers(0, 1000))
def test_counts_are_exact_for_every_decimal_share(n, thousandths):
    assert chosen_count(n, thousandths / 1000) == reference_losses.chosen_count(
        n, f"{thousandths}/1000"
    )


def test_counts_are_exact_where_the_product_is_whole():
    wrong = [
        (n, hundredths)
        for hundredths in range(1, 101)
        for n in range(10, 3000, 10)
        if n * hundredths % 100 == 0 and chosen_count(n, hundredths / 100) != n * hundredths // 100
    ]
    assert wrong == [], "70 * 0.1 is 7, though floats say 7.000000000000001"


def test_counts_are_exact_for_extreme_fractions():
    assert chosen_count(50, 0.0) == 0
    assert chosen_count(0, 0.5) == 0
    assert chosen_count(50, 1.0) == 50
    assert chosen_count(50, 1e-12) == 1


def random_batch(seed, count=300, levels=12):
    """Surprisals with many ties, advantages with zeros, indices in no order, uneven segments."""
    generator = torch.Generator().manual_seed(seed)
    integers = [torch.randint(high, (count,), generator=generator) for high in (levels, 3, 9, 4)]
    index = torch.randperm(count, generator=generator) * 7
    advantage = (integers[1] - 1) * torch.rand(count, generator=generator)
    return batch_of(
        integers[0] / 4, advantage, sequence=integers[2], microbatch=integers[3], index=index
    )


def naive_omega(batch, config):
    segment_T = {"global": torch.zeros_like(batch.sequence_T), "microbatch": batch.microbatch_T}
    segments = segment_T.get(config.scope, batch.sequence_T)
    return reference_losses.omega(
        batch.surprisal_T.tolist(),
        batch.advantage_T.tolist(),
        batch.token_index_T.tolist(),
        segments.tolist(),
        variant=config.variant,
        share=str(config.top_p_ratio),
        w=config.reweight_w,
        m=config.reweight_m,
    )


@pytest.mark.parametrize("scope", ["global", "microbatch", "sequence"])
@pytest.mark.parametrize("variant", ["O1", "C2"])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.1, 0.33, 1.0])
def test_omega_equals_a_full_sort_with_ties(scope, variant, share):
    config = LossConfig(
        scope=scope, variant=variant, top_p_ratio=share, reweight_w=1.25, reweight_m=0.5
    )
    for seed in range(5):
        batch = random_batch(seed)
        signals = plan_stare(batch, config, ALONE, {})
        assert signals.weight_T.dtype == torch.float32
        assert signals.weight_T.tolist() == naive_omega(batch, config)
        assert (signals.weight_T[batch.advantage_T == 0] == 1).all()


def test_the_global_choice_does_not_depend_on_order_or_micro_batches():
    batch, config = random_batch(3), LossConfig(variant="C2")
    order = torch.randperm(300, generator=torch.Generator().manual_seed(9))
    shuffled = dataclasses.replace(
        batch,
        **{
            name: getattr(batch, name)[order]
            for name in ("advantage_T", "sequence_T", "token_index_T", "surprisal_T", "entropy_T")
        },
    )
    expected = plan_stare(batch, config, ALONE, {})
    found = plan_stare(shuffled, config, ALONE, {})
    assert torch.equal(found.weight_T, expected.weight_T[order])
    assert found.metrics == expected.metrics


def test_exactly_k_are_chosen_where_all_are_tied():
    batch = batch_of([1.0] * 25, [1.0] * 25, index=list(range(25))[::-1])
    chosen = select_top(batch.surprisal_T, batch.token_index_T, batch.advantage_T > 0, 0.1, ALONE)
    assert chosen.nonzero().flatten().tolist() == [22, 23, 24], "the three smallest indices"


def test_a_plan_reports_its_metrics():
    surprisal = [5.0, 4.0, 3.0, 2.0, 1.0, 9.0, 8.0, 7.0]
    batch = batch_of(surprisal, [1, 1, 1, 1, 0, -1, -1, 0], entropy=[0.2] * 8)
    signals = plan_stare(batch, LossConfig(variant="C2", top_p_ratio=0.5), ALONE, {})
    assert signals.weight_T.tolist() == pytest.approx([1.1, 1.1, 1, 1, 1, 0.9, 1, 1])
    expected = {
        "gate": 1.0,
        "weight_w": 1.1,
        "weight_m": 0.9,
        "weight_mean": 8.1 / 8,
        "share_positive": 0.5,
        "share_negative": 0.25,
        "chosen_positive": 2.0,
        "chosen_negative": 1.0,
        "threshold_positive": 4.0,
        "threshold_negative": 9.0,
    }
    assert {name: signals.metrics[name] for name in expected} == pytest.approx(expected)
    assert signals.coefficient_T.tolist() == [0.125] * 8


@pytest.mark.parametrize("rewarded", [1.0, -1.0, 0.0])
def test_a_batch_of_one_kind_is_planned(rewarded):
    signals = plan_stare(batch_of([1.0, 2.0], [rewarded] * 2), LossConfig(variant="C2"), ALONE, {})
    assert signals.weight_T.tolist() == pytest.approx(
        [1.0, {1.0: 1.1, -1.0: 0.9, 0.0: 1.0}[rewarded]]
    )


def test_an_empty_batch_is_planned():
    signals = plan_stare(
        batch_of(torch.empty(0), torch.empty(0), sequences=2), LossConfig(), ALONE, {}
    )
    assert signals.weight_T.shape == (0,)
    assert all(math.isfinite(value) for value in signals.metrics.values())


def test_gate_off_is_dapo_bit_for_bit():
    batch = dataclasses.replace(random_batch(1, count=600), entropy_T=torch.full((600,), 0.3001))
    config = LossConfig(variant="C2", target_entropy=0.3)
    signals = plan_stare(batch, config, ALONE, {})
    assert signals.metrics["gate"] == 0.0
    assert torch.equal(signals.weight_T, torch.ones(600))
    tokens = dataclasses.replace(random_tokens(dtype=torch.float32), weight=signals.weight_T)
    for found, expected in zip(
        run("stare", tokens, config), run("dapo", tokens, config), strict=True
    ):
        assert torch.equal(found, expected)
    plain = find_objective("dapo").plan(batch, config, ALONE, {})
    assert torch.equal(plain.coefficient_T, signals.coefficient_T)
    assert torch.equal(plain.weight_T, signals.weight_T)


def on_two_ranks(rank, world_size, config):
    """Every whole sequence of one batch on one of the ranks:
    its token numbers, weights, coefficients, metrics.
    """
    import torch.distributed as dist

    batch = random_batch(4)
    mine = (batch.sequence_T % 2 == rank) if world_size > 1 else torch.ones(300, dtype=torch.bool)
    columns = {
        name: value
        for name, value in vars(batch).items()
        if name.endswith("_T") and value is not None
    }
    share = dataclasses.replace(batch, **{name: value[mine] for name, value in columns.items()})
    across = Across(dist.group.WORLD) if world_size > 1 else ALONE
    signals = plan_stare(share, config, across, {})
    return share.token_index_T, signals.weight_T, signals.coefficient_T, signals.metrics


@pytest.mark.parametrize("aggregation", ["seq-mean-token-mean"])
def test_two_ranks_choose_the_tokens_of_one(aggregation):
    config = LossConfig(variant="C2", aggregation=aggregation)
    index, weight, coefficient, metrics = on_two_ranks(0, 1, config)
    ranks = run_distributed(on_two_ranks, 2, config)
    order = torch.cat([rank[0] for rank in ranks]).argsort()
    assert torch.equal(torch.cat([rank[1] for rank in ranks])[order], weight[index.argsort()])
    torch.testing.assert_close(
        torch.cat([rank[2] for rank in ranks])[order], coefficient[index.argsort()]
    )
    assert ranks[0][3] == ranks[1][3] == pytest.approx(metrics, rel=1e-12)


@pytest.mark.parametrize("variant", ["O1", "C2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_token_weights_of_a_padded_batch(variant, dtype):
    generator = torch.Generator().manual_seed(2)
    surprisal = torch.randint(9, (8, 20), generator=generator).to(dtype).requires_grad_()
    advantage = torch.randint(-1, 2, (8, 1), generator=generator).float().expand(8, 20)
    mask = torch.randint(2, (8, 20), generator=generator)
    found = token_weights(
        surprisal,
        advantage,
        mask,
        variant=variant,
        top_p_ratio=0.2,
        reweight_w=1.25,
        reweight_m=0.75,
    )
    assert found.shape == (8, 20)
    assert found.dtype == torch.float32
    assert not found.requires_grad
    expected = reference_losses.omega(
        surprisal.flatten().tolist(),
        (advantage * mask).flatten().tolist(),
        list(range(160)),
        [0] * 160,
        variant=variant,
        share="0.2",
        w=1.25,
        m=0.75,
    )
    assert found.flatten().tolist() == expected
    assert (found[mask == 0] == 1).all()
    shut = token_weights(surprisal, advantage, mask, variant=variant, gate_on=False)
    assert torch.equal(shut, torch.ones(8, 20))


def test_token_weights_of_tokens_that_raise_entropy():
    surprisal = torch.tensor([[5.0, 4.0, 3.0, 2.0]])
    sensitivity = torch.tensor([[-0.1, 0.2, 0.0, 0.3]])
    ones = torch.ones(1, 4)
    options = {"top_p_ratio": 0.75, "reweight_w": 2.0, "sensitivity": sensitivity}
    assert token_weights(surprisal, ones, ones, **options).tolist() == [[1, 2, 1, 2]]
    options["top_p_ratio"] = 0.25
    assert token_weights(surprisal, ones, ones, **options).tolist() == [[1, 2, 1, 1]]
    with pytest.raises(ValueError, match="sensitivity"):
        token_weights(surprisal, ones, ones, sensitivity=ones[0])


def test_token_weights_refuses_invalid_batches():
    values = torch.ones(2, 3)
    with pytest.raises(ValueError, match="shapes"):
        token_weights(values, values[:1], values)
    with pytest.raises(ValueError, match="variant"):
        token_weights(values, values, values, variant="C3")
    broken = values.clone()
    broken[0, 1] = math.nan
    with pytest.raises(ValueError, match="NaN"):
        token_weights(broken, values, values)
    hidden = values.clone()
    hidden[0, 1] = 0
    assert token_weights(broken, values, hidden)[0, 1] == 1
