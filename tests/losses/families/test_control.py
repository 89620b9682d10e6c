"""Distribution-centric DCPO and EntroPIC: values worked by hand, states, limits and parents."""

import dataclasses
import math

import pytest
import torch

from megatron_stare import losses
from megatron_stare.config import LossConfig
from megatron_stare.losses import find_objective
from tests.losses.batches import ALONE, batch_of

NAME = "dcpo_distribution"
# Where the other temperature's distribution can be written down: roots and squares.
ROOTS = {"temperature_high": 2.0, "temperature_low": 0.5}
CLIPPED = {"eps_clip": 0.2, "eps_clip_high": 0.2, "eps_clip_c": 3.0}


def two_rows(rewards, **more):
    """Two rows of two tokens out of p = (0.8, 0.2): the first row took both, the second twice the
    likelier. A is 1 and -1.
    """
    p = torch.tensor([0.8, 0.2], dtype=torch.float64)
    logits = (p.log() + 0.7).expand(2, 2, 2)  # a constant changes no distribution
    log_prob = p.log()[torch.tensor([[0, 1], [0, 0]])]
    batch = {
        "log_prob": log_prob.requires_grad_(),
        "advantages": torch.tensor([[1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64),
        "response_mask": torch.ones(2, 2),
        "rewards": torch.tensor(rewards, dtype=torch.float64),
        "logits": logits,
    }
    return batch | more


def test_by_hand():
    """S = 0 before the first step, so T = 2: sqrt(0.8) : sqrt(0.2) = 2 : 1, p^T = (2/3, 1/3) and
    w = (5/6, 5/3). f = 1/2, so 0.1 / f = 1/5 and a = 1/6. On the right row A' = 5/6 + w/6, which is
    35/36 and 40/36; on the other -5/6. r = 1: the slope of a token is -A' / 4.
    """
    state: dict[str, float] = {}
    batch = two_rows([1.0, 0.0])
    loss = losses.compute(NAME, batch, state=state, **ROOTS)
    assert float(loss.detach()) == pytest.approx(-(35 + 40 - 30 - 30) / 36 / 4)
    (slope,) = torch.autograd.grad(loss, batch["log_prob"])
    expected = torch.tensor([[35, 40], [-30, -30]], dtype=torch.float64) / -36 / 4
    torch.testing.assert_close(slope, expected)
    assert state == {"surprisal": pytest.approx(-(3 * math.log(0.8) + math.log(0.2)) / 4)}


def test_above_its_target_the_temperature_falls():
    """S = 0.55 of the last step: T = 1/2, 0.64 : 0.04 = 16 : 1, p^T = (16/17, 1/17) and w = (20/17,
    5/17); the gap 0.05 over f = 1/2 is 0.1, a = 1/11.
    """
    batch = two_rows([1.0, 0.0])
    loss = losses.compute(NAME, batch, state={"surprisal": 0.55}, **ROOTS)
    (slope,) = torch.autograd.grad(loss, batch["log_prob"])
    first, second, others = (10 + 20 / 17) / 11, (10 + 5 / 17) / 11, -10 / 11
    expected = torch.tensor([[first, second], [others, others]], dtype=torch.float64) / -4
    torch.testing.assert_close(slope, expected)


@pytest.mark.parametrize(("before", "expected"), [(None, 1.2), (0.5, 1.2), (0.51, 0.8)])
def test_the_last_step_decides_the_temperature(before, expected):
    state = {} if before is None else {"surprisal": before}
    assert find_objective(NAME).tempering_of(LossConfig(name=NAME), state) == expected
    assert find_objective("grpo").tempering_of(LossConfig(), state) is None


def test_given_log_probs_are_those_of_the_logits():
    batch = two_rows([1.0, 0.0])
    own = {key: value for key, value in batch.items() if key != "logits"}
    tempered = torch.tensor([2 / 3, 1 / 3], dtype=torch.float64).log()
    own["tempered_log_prob"] = tempered[torch.tensor([[0, 1], [0, 0]])]
    found = [losses.compute(NAME, each, **ROOTS).detach() for each in (batch, own)]
    assert float(found[0]) == pytest.approx(float(found[1]), rel=1e-12)


def test_the_weight_is_of_the_old_policy_and_has_no_gradient():
    """Off-policy: only r moves, and what is not clipped has the slope -A' r / 4."""
    batch = two_rows([1.0, 0.0])
    now = (batch["log_prob"].detach() + 0.1).requires_grad_()
    loss = losses.compute(
        NAME, batch | {"log_prob": now, "old_log_prob": batch["log_prob"].detach()}, **ROOTS
    )
    (slope,) = torch.autograd.grad(loss, now)
    expected = torch.tensor([[35, 40], [-30, -30]], dtype=torch.float64) / -36 / 4
    torch.testing.assert_close(slope, expected * math.exp(0.1))


@pytest.mark.parametrize(
    ("rewards", "settings"),
    [([0.0, 0.05], {}), ([1.0, 0.0], {"gap_max": 0.0}), ([1.0, 1.0], {"target": 0.0})],
    ids=["none is right", "no gap counts", "at its target"],
)
def test_without_a_mix_it_is_its_parent(rewards, settings):
    batch = two_rows(rewards)
    ours, parent = losses.compute(NAME, batch, **settings), losses.compute("dapo", batch, **CLIPPED)
    assert float(ours.detach()) == float(parent.detach())
    slopes = [torch.autograd.grad(loss, batch["log_prob"])[0] for loss in (ours, parent)]
    assert torch.equal(*slopes)


def test_a_row_without_a_reward_is_not_counted():
    """f = 1 of one judged row: a = 1/11 instead of 1/6, and nothing is mixed into the other."""
    batch = two_rows([1.0, math.nan])
    (slope,) = torch.autograd.grad(losses.compute(NAME, batch, **ROOTS), batch["log_prob"])
    expected = torch.tensor([[10 + 5 / 6, 10 + 5 / 3], [-10, -10]], dtype=torch.float64) / -44
    torch.testing.assert_close(slope, expected)


def test_entropic_takes_the_error_of_every_micro_batch():
    """Three micro-batches of 2, 1 and 1 sequences: E before each is that of those before it, and
    each adds its e times its share of the four sequences, as the authors' code does.
    """
    entropy = [0.5, 0.3, 0.1, 0.2, 0.9, 0.7, 0.4, 0.6]
    part, sequence = [0, 0, 0, 1, 1, 2, 2, 2], [0, 0, 1, 2, 2, 3, 3, 3]
    batch = batch_of([0.01] * 8, [1.0] * 8, entropy, sequence, part, sequences=4)
    settings = {"target": 0.2, "gain": 0.5, "integral_gain": 0.3, "error_of": "microbatch"}
    config = LossConfig(name="entropic", settings=settings)
    found = find_objective("entropic").plan(batch, config, ALONE, {"error_sum": 0.4})
    total, alphas = 0.4, []
    for mean, share in ((0.3, 0.5), (0.55, 0.25), (1.7 / 3, 0.25)):
        alphas.append(0.5 * (mean - 0.2) + 0.3 * total)
        total += (mean - 0.2) * share
    expected = torch.tensor([alphas[number] for number in part])
    torch.testing.assert_close(found.values["extra"], expected)
    assert found.state == {"error_sum": pytest.approx(total)}
    del settings["error_of"]  # the default is the whole batch's
    whole = dataclasses.replace(config, settings=settings)
    plain = find_objective("entropic").plan(batch, whole, ALONE, {"error_sum": 0.4})
    assert len(set(plain.values["extra"].tolist())) == 1
