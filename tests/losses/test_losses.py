"""Every objective against its naive twin:
values, gradients, reductions, STARE's selection and gate.
"""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stare.config import LossConfig, UserError
from megatron_stare.losses import find_objective, stare_gate
from megatron_stare.losses.aggregation import batch_mean, coefficients
from megatron_stare.losses.kl import kl_penalty
from megatron_stare.losses.registry import _objectives, policy_loss
from megatron_stare.losses.stare import chosen_count, plan_stare, select, token_weights
from megatron_stare.numerics.selection import Across
from megatron_stare.records import Group, LossTokens, Prompt, Rollout, TokenBatch
from megatron_stare.scoring.advantages import has_signal, with_advantages
from tests.distributed import run_distributed
from tests.losses import reference_losses

ALONE = Across()
CONFIGS = {
    "paper": LossConfig(),
    "no dual clip": LossConfig(eps_clip_c=0.0),
    "wide": LossConfig(eps_clip=0.5, eps_clip_high=2.0, eps_clip_c=3.0),
    "shut": LossConfig(eps_clip=0.0, eps_clip_high=0.0, eps_clip_c=1.5),
}


def random_tokens(count=600, seed=0, dtype=torch.float64):
    """Tokens whose ratios lie everywhere:
    at 1, inside and beyond the clips, and beyond the clamp at e^20.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(scale):
        return scale * torch.randn(count, generator=generator, dtype=torch.float64)

    old = normal(2.0).abs() + 25.0
    gap = torch.where(
        torch.arange(count) % 3 == 0,
        normal(0.2),
        torch.where(torch.arange(count) % 3 == 1, normal(2.0), normal(15.0)),
    )
    gap[:20] = 0.0
    advantage = normal(1.0)
    advantage[::17] = 0.0
    values = (old - gap, normal(1.0).abs(), old, advantage, 1 + normal(0.3).abs())
    surprisal, entropy, old, advantage, weight = (value.to(dtype) for value in values)
    return LossTokens(surprisal.requires_grad_(), entropy.requires_grad_(), old, advantage, weight)


def run(name, tokens, config):
    """Losses and their gradient by the surprisal."""
    loss = find_objective(name).loss(tokens, config)
    assert loss.shape == tokens.surprisal.shape, "a loss does not reduce"
    return loss.detach(), torch.autograd.grad(loss.sum(), tokens.surprisal)[0]


def twin(name, tokens, config):
    constants = (tokens.old_surprisal, tokens.advantage, tokens.weight)
    columns = [column.detach().tolist() for column in (tokens.surprisal, *constants)]
    values, gradients = reference_losses.values_and_gradients(
        reference_losses.TWINS[name], *columns, config
    )
    return torch.tensor(values, dtype=torch.float64), torch.tensor(gradients, dtype=torch.float64)


def test_the_random_tokens_reach_every_branch():
    tokens = random_tokens()
    log_ratio = (tokens.old_surprisal - tokens.surprisal).detach()
    for side in (tokens.advantage > 0, tokens.advantage < 0):
        for low, high in ((-99, -20), (-20, -0.3), (-0.1, 0.1), (0.3, 2.2), (2.4, 20), (20, 99)):
            assert ((log_ratio > low) & (log_ratio < high) & side).any(), (low, high)


def test_every_objective_has_a_twin():
    assert _objectives.keys() == reference_losses.TWINS.keys()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("name", reference_losses.TWINS)
def test_values_and_gradients_equal_the_twins(name, config):
    for found, expected in zip(
        run(name, random_tokens(), config), twin(name, random_tokens(), config), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", reference_losses.TWINS)
def test_fp32_stays_close_and_finite(name):
    tokens = random_tokens(dtype=torch.float32)
    for found, expected in zip(
        run(name, tokens, LossConfig()), twin(name, tokens, LossConfig()), strict=True
    ):
        assert torch.isfinite(found).all()
        torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["grpo", "dapo", "stare"])
def test_on_policy_the_gradient_is_minus_the_advantage(name):
    tokens = random_tokens()
    tokens = dataclasses.replace(
        tokens, old_surprisal=tokens.surprisal.detach(), weight=torch.ones(600)
    )
    loss, gradient = run(name, tokens, LossConfig())
    assert torch.equal(loss, -tokens.advantage)
    torch.testing.assert_close(gradient, tokens.advantage)


def test_dual_clip_bounds_negative_advantages_only():
    tokens = random_tokens()
    loss, _ = run("dapo", tokens, LossConfig(eps_clip_c=3.0))
    free, _ = run("dapo", tokens, LossConfig(eps_clip_c=0.0))
    negative = tokens.advantage < 0
    assert (loss[negative] <= 3.0 * tokens.advantage[negative].abs() + 1e-12).all()
    assert (free[negative] > 3.0 * tokens.advantage[negative].abs()).any()
    assert torch.equal(loss[~negative], free[~negative])


@pytest.mark.parametrize("name", reference_losses.TWINS)
def test_a_token_does_not_see_its_neighbours(name):
    tokens = random_tokens()
    whole, _ = run(name, tokens, LossConfig())
    columns = (getattr(tokens, field.name) for field in dataclasses.fields(LossTokens))
    part = LossTokens(*(None if column is None else column[100:130] for column in columns))
    assert torch.equal(find_objective(name).loss(part, LossConfig()), whole[100:130])


# --- registry
# --------------------------------------------------------------------------------------------------


def test_an_unknown_loss_lists_the_valid_ones_and_the_nearest():
    with pytest.raises(UserError, match="did you mean 'stare'") as caught:
        find_objective("stair")
    assert all(
        name in str(caught.value) for name in ("grpo", "dapo", "stare", "sft", "loss.name='stair'")
    )


def test_a_name_is_taken_once():
    def grpo(tokens, config):
        return tokens.surprisal

    before = dict(_objectives)
    with pytest.raises(ValueError, match="grpo"):
        policy_loss()(grpo)
    assert _objectives == before


# --- advantages
# --------------------------------------------------------------------------------------------------


def group(rewards):
    rollouts = tuple(
        Rollout((1,), (0.0,), (1,), "completed", 0, reward=reward) for reward in rewards
    )
    return Group(Prompt(5, (1,), ""), rollouts)


def advantages(rewards, normalize_by_std=True):
    return [
        rollout.advantage for rollout in with_advantages(group(rewards), normalize_by_std).rollouts
    ]


@settings(deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=12), st.booleans())
def test_advantages_equal_the_naive_ones(rewards, normalize_by_std):
    expected = reference_losses.advantages_of(rewards, normalize_by_std)
    assert advantages(rewards, normalize_by_std) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_known_advantages():
    assert advantages([1, 0, 0, 0]) == pytest.approx(
        [0.75 / 0.500001, *[-0.25 / 0.500001] * 3], rel=1e-12
    )
    assert advantages([1, 0, 0, 0], False) == [0.75, -0.25, -0.25, -0.25]
    assert advantages([1]) == [1 / 1.000001]
    assert advantages([1], False) == [1.0]
    assert advantages([1, 1, 1]) == [0, 0, 0]


def test_a_missing_reward_is_an_error_that_names_the_prompt():
    with pytest.raises(ValueError, match="prompt 5"):
        with_advantages(group([1, None]))


def test_signal():
    assert has_signal(group([0, 1]))
    assert not has_signal(group([1, 1, 1]))
    assert not has_signal(group([1]))


# --- aggregation
# --------------------------------------------------------------------------------------------------


def batch_of(
    surprisal, advantage, entropy=None, sequence=None, microbatch=None, index=None, sequences=None
):
    """A scored TokenBatch without micro-batches: all that a plan looks at."""
    count = len(surprisal)
    sequence = (
        torch.zeros(count, dtype=torch.long) if sequence is None else torch.as_tensor(sequence)
    )
    return TokenBatch(
        microbatches=(),
        advantage_T=torch.as_tensor(advantage, dtype=torch.float32),
        rollout_logprob_T=torch.zeros(count),
        sequence_T=sequence,
        sequence_tokens_T=torch.bincount(sequence)[sequence] if count else sequence,
        token_index_T=torch.arange(count) if index is None else torch.as_tensor(index),
        microbatch_T=torch.zeros(count, dtype=torch.long)
        if microbatch is None
        else torch.as_tensor(microbatch),
        fresh_T=torch.ones(count, dtype=torch.bool),
        num_sequences=sequences or (int(sequence.max()) + 1 if count else 0),
        surprisal_T=torch.as_tensor(surprisal, dtype=torch.float32),
        entropy_T=torch.full((count,), 0.1)
        if entropy is None
        else torch.as_tensor(entropy, dtype=torch.float32),
    )


AGGREGATIONS = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_coefficients_equal_the_naive_reduction(aggregation):
    generator = torch.Generator().manual_seed(1)
    # the odd sequences have no loss token
    sequence = torch.randint(6, (200,), generator=generator) * 2
    losses = torch.randn(200, generator=generator)
    coefficient_T = coefficients(
        batch_of(losses, losses, sequence=sequence, sequences=12), aggregation, ALONE
    )
    expected = reference_losses.aggregate(losses.tolist(), sequence.tolist(), aggregation)
    assert float((coefficient_T.double() * losses).sum()) == pytest.approx(expected, rel=1e-6)
    assert batch_mean(losses, coefficient_T, ALONE) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_batch_without_a_loss_token_divides_by_nothing(aggregation):
    empty = batch_of(torch.empty(0), torch.empty(0), sequences=3)
    assert coefficients(empty, aggregation, ALONE).shape == (0,)


def test_an_unknown_aggregation_is_an_error():
    with pytest.raises(ValueError, match="mean-of-means"):
        coefficients(batch_of([1.0], [1.0]), "mean-of-means", ALONE)


# --- STARE: how many
# --------------------------------------------------------------------------------------------------


def test_the_golden_counts():
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


def test_counts_at_the_ends():
    assert chosen_count(50, 0.0) == 0
    assert chosen_count(0, 0.5) == 0
    assert chosen_count(50, 1.0) == 50
    assert chosen_count(50, 1e-12) == 1


# --- STARE: which
# --------------------------------------------------------------------------------------------------


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
    chosen = select(batch.surprisal_T, batch.token_index_T, batch.advantage_T > 0, 0.1, ALONE)
    assert chosen.nonzero().flatten().tolist() == [22, 23, 24], "the three smallest indices"


def test_what_a_plan_reports():
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


# --- STARE: the gate
# --------------------------------------------------------------------------------------------------

ADAPTIVE = LossConfig(adaptive=True, alpha=0.05, target_entropy=0.3)


@pytest.mark.parametrize(
    ("entropy", "on"),
    [
        (0.0, True),
        (0.2999, True),
        (0.3, False),
        (0.31, False),
        (math.nan, False),
        (math.inf, False),
        (-math.inf, False),
    ],
)
def test_the_gate_is_strict_and_shut_for_no_number(entropy, on):
    assert stare_gate.decide(entropy, LossConfig(target_entropy=0.3), {}).on is on
    assert stare_gate.decide(entropy, ADAPTIVE, {}).on is on


@pytest.mark.parametrize("entropy", [0.1, 0.3, 0.5])
def test_without_a_gate_it_is_always_on(entropy):
    assert stare_gate.decide(entropy, LossConfig(gate=False), {}).on


@pytest.mark.parametrize(
    ("entropy", "w", "m"), [(0.2, 1.15, 0.85), (0.3, 1.1, 0.9), (0.4, 1.05, 0.95)]
)
def test_one_adaptive_step_and_none_at_the_target(entropy, w, m):
    gate = stare_gate.decide(entropy, ADAPTIVE, {})
    assert (gate.reweight_w, gate.reweight_m) == pytest.approx((w, m))
    assert gate.state == {"reweight_w": gate.reweight_w, "reweight_m": gate.reweight_m}


@pytest.mark.parametrize("entropy", [math.nan, math.inf, -math.inf])
def test_no_number_adapts_nothing(entropy):
    state = {"reweight_w": 1.2, "reweight_m": 0.7}
    assert stare_gate.decide(entropy, ADAPTIVE, state).state == state


@pytest.mark.parametrize(("entropy", "ends"), [(0.0, (1.5, 0.5)), (1.0, (1.0, 1.0))])
def test_the_schedule_stays_inside_its_bounds(entropy, ends):
    state: dict[str, float] = {}
    for _ in range(30):
        state = stare_gate.decide(entropy, ADAPTIVE, state).state
        assert 1.0 <= state["reweight_w"] <= 1.5
        assert 0.5 <= state["reweight_m"] <= 1.0
    assert (state["reweight_w"], state["reweight_m"]) == ends


def test_without_adaptation_the_weights_stay():
    assert stare_gate.decide(0.0, LossConfig(), {}).state == {"reweight_w": 1.1, "reweight_m": 0.9}


def test_the_plan_applies_the_schedule_before_the_step_it_serves():
    batch = batch_of([1.0, 2.0], [1.0, -1.0], entropy=[0.1, 0.2])
    config = dataclasses.replace(ADAPTIVE, variant="C2")
    first = plan_stare(batch, config, ALONE, {})
    assert first.weight_T.tolist() == pytest.approx([1.15, 0.85])
    second = plan_stare(batch, config, ALONE, first.state)
    assert second.weight_T.tolist() == pytest.approx([1.2, 0.8])


def test_the_batch_entropy_is_aggregated_like_the_loss():
    sequence, entropy = [0, 0, 0, 1], [0.2, 0.2, 0.2, 0.5]
    batch = batch_of([1.0] * 4, [1.0] * 4, entropy=entropy, sequence=sequence)
    token_mean = plan_stare(batch, LossConfig(target_entropy=0.3), ALONE, {})
    sequence_mean = plan_stare(
        batch, LossConfig(target_entropy=0.3, aggregation="seq-mean-token-mean"), ALONE, {}
    )
    assert token_mean.metrics["gate"] == 1.0  # 0.275
    assert sequence_mean.metrics["gate"] == 0.0  # 0.35


# --- STARE for another trainer
# ----------------------------------------------------------------------------------------


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


def test_token_weights_refuses_what_it_cannot_weigh():
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


# --- KL to a reference
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3", "low_var_kl"])
def test_kl_estimators_equal_their_formulas(kind):
    """Against plain float64 arithmetic, far enough apart that the clamps bite;
    gradients by autograd of both.
    """
    generator = torch.Generator().manual_seed(11)
    surprisal = (torch.rand(200, generator=generator, dtype=torch.float64) * 8).requires_grad_()
    reference = torch.rand(200, generator=generator, dtype=torch.float64) * 8
    zeros = torch.zeros(200, dtype=torch.float64)
    tokens = LossTokens(surprisal, zeros, zeros, zeros, zeros, reference_surprisal=reference)
    ours = kl_penalty(tokens, kind)
    d = surprisal - reference  # ln pi_ref - ln pi
    naive = {
        "k1": -d,
        "abs": abs(d),
        "k2": d * d / 2,
        "k3": torch.exp(d) - d - 1,
        "low_var_kl": torch.clamp(torch.exp(d) - d - 1, -10, 10),
    }[kind]
    torch.testing.assert_close(ours, naive, rtol=1e-12, atol=1e-12)
    grads = [
        torch.autograd.grad(value.sum(), surprisal, retain_graph=True)[0] for value in (ours, naive)
    ]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


def test_kl_refuses_what_it_cannot_do():
    zeros = torch.zeros(2)
    with pytest.raises(ValueError, match="reference"):
        kl_penalty(LossTokens(zeros, zeros, zeros, zeros, zeros), "k1")
    with pytest.raises(ValueError, match=r"k4.*unknown"):
        kl_penalty(LossTokens(zeros, zeros, zeros, zeros, zeros, reference_surprisal=zeros), "k4")
