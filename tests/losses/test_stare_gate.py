"""STARE's closed loop."""

import dataclasses
import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from megatron_stare.config import LossConfig
from megatron_stare.losses import find_objective, stare_gate
from tests.losses.batches import ALONE, batch_of

plan_stare = find_objective("stare").plan


def decide(entropy, config, state):
    bounds = (config.reweight_w, config.reweight_m, config.w_max, config.m_min)
    band = stare_gate.Band(config.target_entropy, *bounds)
    alpha = config.alpha if config.adaptive else 0.0
    return stare_gate.decide(entropy, band, config.gate, alpha, state)


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
def test_the_gate_is_strict_and_closed_for_nan(entropy, on):
    assert decide(entropy, LossConfig(target_entropy=0.3), {}).on is on
    assert decide(entropy, ADAPTIVE, {}).on is on


@pytest.mark.parametrize("entropy", [0.1, 0.3, 0.5])
def test_without_a_gate_the_weights_always_apply(entropy):
    assert decide(entropy, LossConfig(gate=False), {}).on


@pytest.mark.parametrize(
    ("entropy", "w", "m"), [(0.2, 1.15, 0.85), (0.3, 1.1, 0.9), (0.4, 1.05, 0.95)]
)
def test_one_adaptive_step_and_none_at_the_target(entropy, w, m):
    gate = decide(entropy, ADAPTIVE, {})
    assert (gate.reweight_w, gate.reweight_m) == pytest.approx((w, m))
    assert gate.state == {"reweight_w": gate.reweight_w, "reweight_m": gate.reweight_m}


@pytest.mark.parametrize("entropy", [math.nan, math.inf, -math.inf])
def test_nan_adapts_nothing(entropy):
    state = {"reweight_w": 1.2, "reweight_m": 0.7}
    assert decide(entropy, ADAPTIVE, state).state == state


@pytest.mark.parametrize(("entropy", "ends"), [(0.0, (1.5, 0.5)), (1.0, (1.0, 1.0))])
def test_the_schedule_stays_inside_its_bounds(entropy, ends):
    state: dict[str, float] = {}
    for _ in range(30):
        state = decide(entropy, ADAPTIVE, state).state
        assert 1.0 <= state["reweight_w"] <= 1.5
        assert 0.5 <= state["reweight_m"] <= 1.0
    assert (state["reweight_w"], state["reweight_m"]) == ends


def test_without_adaptation_the_weights_stay():
    assert decide(0.0, LossConfig(), {}).state == {"reweight_w": 1.1, "reweight_m": 0.9}


def test_a_resumed_run_takes_changed_weights_unless_they_adapt():
    config = LossConfig(reweight_w=1.25, reweight_m=0.8)
    state = {"reweight_w": 1.1, "reweight_m": 0.9}  # of the run before
    found = decide(0.0, config, state).state
    assert found == {"reweight_w": 1.25, "reweight_m": 0.8}
    found = decide(0.3, dataclasses.replace(config, adaptive=True), state).state
    assert found == state, "at the target"


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


def with_sensitivity(advantage, sensitivity, entropy):
    count = len(advantage)
    batch = batch_of([1.0 + i for i in range(count)], advantage, entropy=[entropy] * count)
    return dataclasses.replace(batch, sensitivity_T=torch.tensor(sensitivity))


def test_the_largest_effect_is_chosen_instead_of_the_largest_surprisal():
    """|A| g is 0.1, 0.6 and -0.9 where A > 0, and 0.2 and -0.8 where A < 0: L+ is the second token,
    which raises entropy most, and L- the third, which lowers it most; by surprisal the last ones.
    """
    batch = with_sensitivity([1.0, 2.0, -1.0, -1.0, 1.0], [0.1, 0.3, 0.2, -0.8, -0.9], 0.1)
    config = LossConfig(top_p_ratio=0.1, select="sensitivity", variant="C2")
    found = plan_stare(batch, config, ALONE, {})
    assert found.weight_T.tolist() == pytest.approx([1, 1.1, 0.9, 1, 1])
    assert found.metrics["rising_share_positive"] == found.metrics["rising_share_negative"] == 1.0
    config = LossConfig(top_p_ratio=0.1, variant="C2")
    found = plan_stare(batch, config, ALONE, {})
    assert found.weight_T.tolist() == pytest.approx([1, 1, 1, 0.9, 1.1])
    assert (found.metrics["share_positive"], found.metrics["share_negative"]) == (0.6, 0.4)
    found = plan_stare(batch, dataclasses.replace(config, variant="O1"), ALONE, {})
    assert found.metrics["weight_mean"] == pytest.approx(1.02)


@pytest.mark.parametrize("scope", ["global", "sequence", "microbatch"])
def test_rising_leaves_out_what_would_lower_entropy(scope):
    """By surprisal L+ is the two last tokens with A > 0, of which the fifth has g < 0; L- is the
    last token, whose g is negative, so that no token with A < 0 is left in a share of one.
    """
    advantage = [1.0, 1.0, -1.0, 1.0, 1.0, -1.0]
    batch = with_sensitivity(advantage, [0.1, -0.2, 0.3, 0.4, -0.5, -0.6], 0.1)
    config = LossConfig(top_p_ratio=0.5, select="rising", variant="C2", scope=scope)
    found = plan_stare(batch, config, ALONE, {})
    if scope == "global":  # two of four with A > 0 at most, one of two with A < 0
        assert found.weight_T.tolist() == pytest.approx([1.1, 1, 0.9, 1.1, 1, 1])
        assert found.metrics["chosen_positive"] == 2.0 and found.metrics["gamma"] > 0
    assert found.metrics["rising_share_positive"] == found.metrics["rising_share_negative"] == 1.0
    few = dataclasses.replace(config, top_p_ratio=0.25, scope="global")
    assert plan_stare(batch, few, ALONE, {}).weight_T.tolist() == pytest.approx(
        [1, 1, 0.9, 1.1, 1, 1]
    )
    none = dataclasses.replace(batch, sensitivity_T=-torch.ones(6))
    found = plan_stare(none, config, ALONE, {})
    assert found.weight_T.tolist() == [1.0] * 6 and found.metrics["chosen_positive"] == 0


CRITICAL = LossConfig(
    controller="critical", target_entropy=0.3, w_max=3.0, variant="C2", top_p_ratio=0.1
)


def test_the_critical_controllers_first_steps():
    """A g is -0.5, 0.1, 0.2: sum -0.2; L+ the last token, Gamma 0.2, so Lambda / Gamma = 1.

    Hbar 0.26, e = 0.04: W = 1 + 1 + 5 * 0.04 + 0.5 * 0.04 = 2.22, and again with I = 0.04: 2.24.
    """
    batch = with_sensitivity([1.0, 1.0, 1.0], [-0.5, 0.1, 0.2], 0.26)
    first = plan_stare(batch, CRITICAL, ALONE, {})
    assert first.metrics["weight_w"] == pytest.approx(2.22, rel=1e-6)
    assert first.metrics["weight_m"] == 0.5
    second = plan_stare(batch, CRITICAL, ALONE, first.state)
    assert second.metrics["weight_w"] == pytest.approx(2.24, rel=1e-6)
    other = dataclasses.replace(batch, sensitivity_T=torch.tensor([-0.7, 0.1, 0.2]))
    # Lambda / Gamma = 2, smoothed to 1 + 0.1 (2 - 1)
    third = plan_stare(other, CRITICAL, ALONE, second.state)
    assert third.metrics["weight_w"] == pytest.approx(1 + 1.1 + 0.2 + 0.06, rel=1e-6)


def test_the_critical_controllers_integral_does_not_wind_up():
    low = with_sensitivity([1.0, 1.0, 1.0], [-0.5, 0.1, 0.2], 0.0)
    config = dataclasses.replace(CRITICAL, w_max=2.0)
    state: dict[str, float] = {}
    for _ in range(20):
        signals = plan_stare(low, config, ALONE, state)
        state = signals.state
        assert signals.metrics["weight_w"] == 2.0
    assert state["integral"] == 0.0
    high = with_sensitivity([1.0, 1.0, 1.0], [-0.5, 0.1, 0.2], 0.9)
    for _ in range(20):
        signals = plan_stare(high, config, ALONE, state)
        state = signals.state
        assert signals.metrics["weight_w"] == 1.0
    assert state["integral"] == 0.0
    falling = with_sensitivity([1.0, 1.0, -1.0], [-0.5, -0.1, -0.2], 0.26)
    # Gamma is not positive: the smoothed excess and the integral stay
    assert plan_stare(falling, config, ALONE, state).state["excess"] == state["excess"]


@pytest.mark.parametrize(
    ("g", "entropy", "integral"),
    [
        ([-0.5, 0.1, 0.2], 0.32, -0.01),  # W = 1 + 1 - 0.1 is inside its bounds
        ([0.5, 0.1, 0.2], 0.26, 0.02),  # W = 1 - 4 + 0.2 is below them, and e > 0
        ([-0.9, 0.1, 0.2], 0.32, -0.01),  # W = 1 + 3 - 0.1 is above them, and e < 0
    ],
)
def test_the_critical_controllers_integral_moves_unless_a_bound_holds_w_back(g, entropy, integral):
    batch = with_sensitivity([1.0, 1.0, 1.0], g, entropy)
    for gate in (True, False):
        config = dataclasses.replace(CRITICAL, gate=gate)
        found = plan_stare(batch, config, ALONE, {})
        assert found.state["integral"] == pytest.approx(integral)
        assert found.metrics["gate"] == (entropy < 0.3 or not gate)


def test_the_critical_controller_does_not_raise_w_where_that_lowers_entropy():
    falling = with_sensitivity([1.0, 1.0, -1.0], [-0.5, -0.1, -0.2], 0.1)
    state = {"reweight_w": 1.3, "excess": 0.8, "integral": 0.5}
    found = plan_stare(falling, CRITICAL, ALONE, state)
    assert found.metrics["gate"] == 1.0 and found.metrics["gamma"] < 0
    assert found.state["reweight_w"] == 1.3 and found.state["integral"] == 0.5
    high = with_sensitivity([1.0, 1.0, -1.0], [-0.5, -0.1, -0.2], 0.9)
    assert plan_stare(high, CRITICAL, ALONE, state).state["reweight_w"] == 1.0
    for g in (-0.1, 0.0):  # Gamma 0: L+ moves nothing
        flat = with_sensitivity([1.0, 1.0, -1.0], [-0.5, g, -0.2], 0.26)
        found = plan_stare(flat, CRITICAL, ALONE, state)
        assert found.state == state | {"reweight_m": 0.5} and found.metrics["weight_w"] == 1.3


@pytest.mark.parametrize("entropy", [math.nan, math.inf])
@pytest.mark.parametrize("gate", [True, False])
def test_the_critical_controller_keeps_w_where_entropy_is_not_finite(gate, entropy):
    advantage_T, sensitivity_T = torch.ones(3), torch.tensor([-0.5, 0.1, 0.2])
    up_T = torch.tensor([False, False, True])
    band = stare_gate.Band(0.3, 1.1, 0.9, 3.0, 0.5)
    for state in ({"reweight_w": 1.3, "integral": 0.5, "excess": 0.8}, {"integral": 0.5}, {}):
        step = SimpleNamespace(
            advantage_T=advantage_T,
            sensitivity_T=sensitivity_T,
            across=ALONE,
            entropy=entropy,
            state=state,
        )
        found = stare_gate.critical(step, up_T, band, gate)
        assert found.on == (not gate) and found.reweight_m == 0.5
        assert found.reweight_w == state.get("reweight_w", 1.1)
        excess = 0.8 + 0.1 * (1.0 - 0.8) if "excess" in state else 1.0
        assert found.memory == pytest.approx(
            {"integral": state.get("integral", 0.0), "excess": excess}
        )
    nothing = stare_gate.critical(step, torch.zeros(3, dtype=torch.bool), band, gate)
    assert nothing.memory == {"integral": 0.0}, "without L+ there is no excess to smooth"


@pytest.mark.parametrize(
    ("advantage", "g"),
    [
        ([1.0, 2.0, -1.0, -1.0, 0.0, 0.5], [0.1, -0.3, 0.2, -0.8, 0.4, 1.9]),
        ([1.0, 2.0, -1.0], [-0.1, -0.3, 0.0]),  # Gamma is negative
        ([0.0, -1.0], [0.3, 0.2]),  # no L+
    ],
)
def test_the_metrics_of_sensitivity_are_what_their_docstring_says(advantage, g):
    up = [a > 0 and n % 2 == 1 for n, a in enumerate(advantage)]
    down = [a < 0 for a in advantage]
    tensors = [torch.tensor(values) for values in (g, advantage, up, down)]
    found = stare_gate.sensitivity_metrics(*tensors, ALONE)
    pairs, count = list(zip(advantage, g, strict=True)), len(g)
    gamma = sum(a * s for a, s in itertools.compress(pairs, up))
    drift = sum(a * s for a, s in pairs)
    expected = {
        "quadrant/positive_rising": sum(a > 0 and s > 0 for a, s in pairs) / count,
        "quadrant/positive_falling": sum(a > 0 and s <= 0 for a, s in pairs) / count,
        "quadrant/negative_rising": sum(a < 0 and s > 0 for a, s in pairs) / count,
        "quadrant/negative_falling": sum(a < 0 and s <= 0 for a, s in pairs) / count,
        "entropy_drift": drift / count,
        "gamma": gamma / count,
    }
    for side, chosen in (("positive", up), ("negative", down)):
        if own := list(itertools.compress(g, chosen)):
            expected[f"sensitivity_{side}"] = sum(own) / len(own)
            expected[f"rising_share_{side}"] = sum(s > 0 for s in own) / len(own)
    if gamma > 0:
        expected["critical_weight_excess"] = -drift / gamma
    assert found == pytest.approx(expected, rel=1e-6)
