"""Every objective against its float64 twin; the registry of losses."""

import dataclasses

import pytest
import torch

from megatron_stare.config import LossConfig, UserError
from megatron_stare.losses import find_objective, objective_of, reading
from megatron_stare.losses.registry import _objectives, policy_loss
from megatron_stare.records import LossTokens
from tests.losses import reference_losses
from tests.losses.batches import random_tokens, run

PAPER = reference_losses.PAPER
CONFIGS = {
    "paper": PAPER,
    "no dual clip": dataclasses.replace(PAPER, eps_clip_c=0.0),
    "wide": LossConfig(eps_clip=0.5, eps_clip_high=2.0, eps_clip_c=3.0),
    "shut": LossConfig(eps_clip=0.0, eps_clip_high=0.0, eps_clip_c=1.5),
}


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
    single, whole = reference_losses.TWINS.keys(), reference_losses.SEQUENCE_TWINS.keys()
    assert not (single | whole) - _objectives.keys()


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
    for found, expected in zip(run(name, tokens, PAPER), twin(name, tokens, PAPER), strict=True):
        assert torch.isfinite(found).all()
        torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["grpo", "dapo", "stare"])
def test_on_policy_the_gradient_is_minus_the_advantage(name):
    tokens = random_tokens()
    tokens = dataclasses.replace(
        tokens, old_surprisal=tokens.surprisal.detach(), weight=torch.ones(600)
    )
    loss, gradient = run(name, tokens, PAPER)
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
    whole, _ = run(name, tokens, PAPER)
    columns = {field.name: getattr(tokens, field.name) for field in dataclasses.fields(LossTokens)}
    part = dataclasses.replace(
        tokens, **{n: c[100:130] for n, c in columns.items() if isinstance(c, torch.Tensor)}
    )
    assert torch.equal(find_objective(name).loss(part, PAPER), whole[100:130])


def test_a_loss_of_single_tokens_cannot_sum_over_sequences():
    tokens = random_tokens()
    for attempt in (tokens.sequence_sum, tokens.sequence_mean):
        with pytest.raises(ValueError, match="recompute"):
            attempt(tokens.surprisal)


def test_an_unknown_loss_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'stare'") as caught:
        find_objective("stair")
    assert "loss.name='stair'" in str(caught.value) and "`algorithms` lists" in str(caught.value)


def test_a_name_is_taken_once():
    def grpo(tokens):
        return tokens.surprisal

    before = dict(_objectives)
    with pytest.raises(ValueError, match="grpo"):
        policy_loss()(grpo)
    assert _objectives == before


def test_a_users_loss_is_found_by_its_dotted_path(tmp_path, monkeypatch):
    text = """
from megatron_stare.losses import policy_loss
from megatron_stare.losses.settings import NonNegative

@policy_loss(family="own")
def bounded(tokens, *, limit: NonNegative = 2.0):
    return -tokens.advantage * tokens.ratio.clamp(max=limit)

def plain(tokens):
    return tokens.surprisal
"""
    (tmp_path / "own_losses.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("megatron_stare.losses.registry._objectives", dict(_objectives))
    config = LossConfig(name="own_losses.bounded", settings={"limit": 0.5})
    tokens = random_tokens()
    found = objective_of(config).bind(config).function(tokens)
    expected = -tokens.advantage * torch.minimum(tokens.ratio, torch.tensor(0.5)) * tokens.weight
    torch.testing.assert_close(found, expected.to(found.dtype))
    with pytest.raises(UserError, match="put @policy_loss"):
        find_objective("own_losses.plain")
    with pytest.raises(UserError, match="has no 'missing'"):
        find_objective("own_losses.missing")


@pytest.mark.parametrize("reduce", [torch.Tensor.sum, torch.Tensor.mean, float, "keep"])
def test_a_loss_must_return_one_value_per_token(reduce):
    """A loss that reduces would train with a gradient that depends on the micro-batches."""

    def reduced(tokens):
        loss = -tokens.advantage * tokens.ratio
        if reduce == "keep":
            return loss[:, None]
        return float(loss.detach().sum()) if reduce is float else reduce(loss)

    try:
        policy_loss()(reduced)
        with pytest.raises(UserError, match=r"reduced returned .* one value per token, shape"):
            find_objective("reduced").bind(LossConfig(name="reduced")).function(random_tokens())
    finally:
        _objectives.pop("reduced")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"name": "sft", "eps_clip": 0.3}, "loss.eps_clip=0.3"),
        ({"name": "dapo", "reweight_w": 1.4}, "loss.reweight=stare"),
        ({"name": "gpg", "variant": "C2"}, "the objective gpg does not read it"),
        ({"name": "bapo", "eps_clip_high": 0.3}, "a3po, "),
        ({"name": "gpg", "reweight": "stare", "eps_clip": 0.1}, "loss.eps_clip=0.1"),
        ({"name": "arm", "alpha": 0.2, "settings": {"alpha": 0.1}}, "loss.alpha=0.2"),
    ],
)
def test_a_field_that_the_objective_does_not_read_is_refused(settings, named):
    config = LossConfig(**settings)
    with pytest.raises(UserError, match="has no effect") as error:
        objective_of(config)
    assert named in str(error.value)
    kept = reading(config)
    assert objective_of(kept).name == settings["name"]
    assert reading(config, list(settings)) == config, "what is given stays, to be refused"


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        ({}, "total_steps"),
        ({"schedule": "entropy"}, "initial"),
        ({"schedule": "epoch", "total_steps": 8, "epochs": 1}, "epochs of at least 2"),
    ],
)
def test_an_incomplete_schedule_is_refused_before_anything_is_sampled(settings, missing):
    with pytest.raises(UserError, match=missing):
        objective_of(LossConfig(name="positive_reweighting", settings=settings))


def test_fields_that_something_reads_are_taken():
    objective_of(LossConfig(name="ce_gppo", reweight="stare", reweight_w=1.4, variant="C2"))
    objective_of(LossConfig(name="dapo", target_entropy=0.2, kl_loss_coef=0.1))
    for name, objective in _objectives.items():
        found = LossConfig(name=name, **{"eps_clip": 0.1} if objective.reads("eps_clip") else {})
        assert not objective.unread(found)
