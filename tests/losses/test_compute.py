"""`compute` against naive float64 twins, values and gradients; reductions, limits and errors."""

import dataclasses
import math

import pytest
import torch

from megatron_stare import losses
from megatron_stare.config import UserError
from megatron_stare.losses.registry import all_objectives
from megatron_stare.records import LossPlan
from tests.losses import reference_distances as further
from tests.losses import reference_objectives as twins

NORM, TOKEN, SEQUENCE = "seq-mean-token-sum-norm", "token-mean", "seq-mean-token-mean"
# name -> (twin, aggregation, settings)
CASES = {
    "a3po": (further.a3po, TOKEN, {}),
    "aent": (further.aent, TOKEN, {}),
    "ar": (lambda batch: twins.ar(batch, 0.2), TOKEN, {}),
    "ar_lopti": (lambda batch: twins.ar(batch, 0.3), TOKEN, {}),
    "arm": (further.arm, TOKEN, {"alpha": 0.1}),
    "aspo": (further.aspo, TOKEN, {}),
    "bapo": (twins.bapo, TOKEN, {}),
    "ce_gppo": (twins.ce_gppo, TOKEN, {}),
    "cispo": (twins.cispo, TOKEN, {}),
    "dapo": (twins.dapo, TOKEN, {}),
    "dcpo": (twins.dcpo, SEQUENCE, {}),
    "dcpo_distribution": (further.dcpo_distribution, TOKEN, {}),
    "dgpo": (twins.dgpo, TOKEN, {}),
    "dppo": (lambda batch: further.dppo(batch, "tv"), NORM, {}),
    "dppo_kl": (lambda batch: further.dppo(batch, "kl"), NORM, {}),
    "dppo_tv": (lambda batch: further.dppo(batch, "tv"), NORM, {}),
    "dr_grpo": (lambda batch: twins.clipped(batch, 0.2, 0.2), NORM, {}),
    "entro_adv": (twins.entro_adv, TOKEN, {}),
    "entro_reg": (twins.entro_reg, TOKEN, {}),
    "entropic": (further.entropic, TOKEN, {"probability_threshold": 0.05}),
    "epo": (lambda batch: further.epo(batch, "token"), TOKEN, {"first_turn": 1}),
    "entropy_20": (twins.entropy_20, TOKEN, {}),
    "erc": (twins.erc, TOKEN, {}),
    "espo": (further.espo, "rows", {}),
    "gmpo": (further.gmpo, "rows", {}),
    "gpg": (lambda b: twins.every(b, lambda x: -b.a(x) * b.log_prob[x]), TOKEN, {}),
    "gppo": (lambda batch: twins.ce_gppo(batch, 1.0, 1.0), TOKEN, {}),
    "grpo": (lambda batch: twins.clipped(batch, 0.2, 0.2), TOKEN, {}),
    "grpo_clip_b": (twins.grpo_clip_b, TOKEN, {}),
    "grpo_clip_v": (twins.grpo_clip_v, TOKEN, {}),
    "grpo_ds": (twins.dapo, TOKEN, {}),
    "gspo": (further.gspo, SEQUENCE, {}),
    "hapo": (twins.hapo, TOKEN, {}),
    "just_rl": (twins.dapo, TOKEN, {}),
    "kl_cov": (further.kl_cov, TOKEN, {}),
    "kpo": (further.kpo, SEQUENCE, {}),
    "lp_reg": (further.lp_reg, TOKEN, {"rho": 0.2}),
    "minpro": (further.minpro, TOKEN, {"eps_clip": 0.2, "eps_clip_high": 0.2}),
    "nsr": (lambda batch: twins.one_side(batch, -1), TOKEN, {}),
    "opefo": (further.opefo, TOKEN, {}),
    "psr": (lambda batch: twins.one_side(batch, 1), TOKEN, {}),
    "repo_r": (further.repo_r, TOKEN, {"target": 1.0, "zeta": 0.03}),
    "sapo": (twins.sapo, SEQUENCE, {}),
    "sft": (lambda b: twins.every(b, lambda x: -b.log_prob[x]), TOKEN, {}),
    "siren": (further.siren, NORM, {"anchor": 0.2, "coefficient": 0.3}),
    "skywork_or1": (lambda batch: twins.clipped(batch, 0.2, 0.2), TOKEN, {}),
    "stapo": (twins.stapo, TOKEN, {}),
    "stare": (further.stare, TOKEN, {"variant": "C2", "gate": False}),
    "steer": (twins.steer, TOKEN, {}),
    "steer_exp": (lambda batch: twins.steer(batch, "exp"), TOKEN, {}),
    "steer_linear": (twins.steer, TOKEN, {}),
    "w_reinf": (lambda batch: twins.clipped(batch, 0.2, 0.2), TOKEN, {}),
}
# Held by tests of their own: a random draw, a schedule, a bound that has to be set.
APART = {"clip_cov", "positive_reweighting", "adapo"}


def random_batch(seed=0, rows=6, columns=11, vocabulary=17, spread=0.5):
    """Ragged rows, one with tool output inside and one without a loss token; A = 0 in one row."""
    dice = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=dice, dtype=torch.float64)

    logits = 2 * normal(rows, columns, vocabulary)
    target = torch.randint(vocabulary, (rows, columns), generator=dice)
    mask = torch.zeros(rows, columns)
    for row, length in enumerate([11, 7, 1, 9, 0, 10]):
        mask[row, :length] = 1
    mask[0, 3:5] = 0
    log_prob = torch.log_softmax(logits, -1).gather(-1, target[..., None])[..., 0]
    old = (log_prob + spread * normal(rows, columns)).clamp(max=-1e-3)
    rollout = (old + 0.3 * normal(rows, columns)).clamp(max=-1e-3)
    advantage = normal(rows, 1).expand(rows, columns).clone()
    advantage[0], advantage[1], advantage[3] = 0.7, -0.9, 0.0  # both signs in every draw
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    return {
        "log_prob": log_prob.requires_grad_(),
        "old_log_prob": old,
        "rollout_log_prob": rollout,
        "advantages": advantage,
        "entropy": entropy.clone().requires_grad_(),
        "old_entropy": (entropy * (1 + 0.06 * normal(rows, columns))).clamp(min=0.01),
        "response_mask": mask,
        "logits": logits.requires_grad_(),
        "group_ids": torch.tensor([0, 0, 0, 7, 7, 7]),
        "rewards": torch.tensor([1.0, 0.0, 0.06, 0.05, 1.0, -1.0], dtype=torch.float64),
    }


def twin_batch(batch):
    return twins.Batch(
        batch["log_prob"],
        *(batch[f"{name}_log_prob"] for name in ("old", "rollout")),
        *(batch[name] for name in ("advantages", "entropy", "old_entropy", "logits")),
        batch["response_mask"],
        *(batch[name].tolist() for name in ("group_ids", "rewards")),
    )


def reduced(found, batch, aggregation):
    """The batch loss by its definition."""
    rows = {}
    for (row, _), loss in sorted(found.items()):
        rows.setdefault(row, []).append(loss)
    total = torch.stack([loss for _, loss in sorted(found.items())]).sum()
    if aggregation == TOKEN:
        return total / len(found)
    if aggregation == NORM:
        return total / batch["log_prob"].shape[1]
    means = torch.stack([torch.stack(part).mean() for part in rows.values()])
    if aggregation == "rows":
        return means.sum() / batch["log_prob"].shape[0]
    return means.mean()


def gradients(loss, batch):
    inputs = [batch[key] for key in ("log_prob", "entropy", "logits")]
    if not loss.requires_grad:
        return [torch.zeros_like(value) for value in inputs]
    return torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)


def test_every_objective_has_a_twin():
    assert CASES.keys() | APART == all_objectives().keys()


@pytest.mark.parametrize("spread", [0.3, 1.5])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_the_twins(name, spread):
    twin, aggregation, settings = CASES[name]
    for seed in range(2):
        batch = random_batch(seed, spread=spread)
        found = losses.compute(name, batch, **settings)
        expected = reduced(twin(twin_batch(batch)), batch, aggregation)
        assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-9, abs=1e-12)
        for ours, theirs in zip(gradients(found, batch), gradients(expected, batch), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_on_policy_the_gradient_is_live(name):
    batch = random_batch(3)
    own = {key: batch[key] for key in batch if "old" not in key and "rollout" not in key}
    loss = losses.compute(name, own, **CASES[name][2])
    slope = gradients(loss, batch)[0]
    assert math.isfinite(float(loss.detach())) and bool(slope.isfinite().all())
    assert bool((slope != 0).any()), "r = 1, and ln pi moves it"


def test_values_outside_of_the_mask_are_not_read():
    for name in ("dapo", "steer", "gspo", "kpo", "hapo"):
        clean, dirty = random_batch(1), random_batch(1)
        for key in ("log_prob", "advantages", "old_log_prob", "entropy"):
            value = dirty[key].detach().clone()
            value[dirty["response_mask"] == 0] = math.nan
            dirty[key] = value.requires_grad_(key in ("log_prob", "entropy"))
        one, other = losses.compute(name, clean), losses.compute(name, dirty)
        assert torch.equal(one.detach(), other.detach())
        assert torch.equal(gradients(one, clean)[0], gradients(other, dirty)[0])


OF_NO_ADVANTAGE = ("sft", "entropic", "dcpo_distribution")


@pytest.mark.parametrize("name", [name for name in CASES if name not in OF_NO_ADVANTAGE])
def test_without_advantage_nothing_moves(name):
    batch = random_batch(2)
    batch["advantages"] = torch.zeros_like(batch["advantages"])
    if name in ("psr", "nsr"):
        assert float(losses.compute(name, batch).detach()) == 0.0
        return
    loss = losses.compute(name, batch, **CASES[name][2])
    slopes = gradients(loss, batch)
    if name == "kl_cov":
        return  # its penalty stays
    assert bool((slopes[0] == 0).all())


def test_a_single_token_and_a_group_of_one():
    for name, (_, _, settings) in CASES.items():
        batch = {key: value[:1] for key, value in random_batch(4).items()}
        batch["response_mask"] = torch.zeros_like(batch["response_mask"])
        batch["response_mask"][0, 2] = 1
        assert math.isfinite(float(losses.compute(name, batch, **settings).detach())), name


def same(one, other, batch):
    assert float(one.detach()) == pytest.approx(float(other.detach()), rel=1e-10, abs=1e-13)
    torch.testing.assert_close(gradients(one, batch)[0], gradients(other, batch)[0])


def test_reductions_to_their_parents():
    batch = random_batch(5, spread=0.4)
    compute = losses.compute
    dual = {"eps_clip_high": 0.28, "eps_clip_c": 10.0}
    same(compute("steer", batch, w_min=1.0, w_max=1.0), compute("dapo", batch), batch)
    same(
        compute("ce_gppo", batch, beta_low=1.0, beta_high=1.0),
        compute("gppo", batch),
        batch,
    )
    same(
        compute("stapo", batch, probability_threshold=0.0),
        compute("dapo", batch, eps_clip_c=0.0),
        batch,
    )
    fixed = {"ratio_lower_start": 0.8, "ratio_lower_max": 0.8}
    fixed |= {"ratio_upper_start": 1.28, "ratio_upper_max": 1.28}
    same(
        compute("bapo", batch, **fixed),
        compute("dapo", batch, eps_clip_c=3.0),
        batch,
    )
    same(compute("entropy_20", batch, entropy_share=1.0), compute("dapo", batch), batch)
    same(compute("ar_lopti", batch, alpha=0.0, **dual), compute("dapo", batch), batch)
    low, high = (compute("ar_lopti", batch, tokens_of=part) for part in ("low", "high"))
    same(low + high, compute("ar_lopti", batch), batch)
    # gain 1 from the start: the filter follows ln r, and the ratio is the token's own
    same(
        compute("kpo", batch, process_noise=1e12, eps_clip=0.2, eps_clip_high=0.2),
        compute("grpo", batch, aggregation=SEQUENCE),
        batch,
    )
    same(compute("stare", batch, top_p_ratio=0.0), compute("dapo", batch), batch)
    wide = {"ratio_low": 0.0, "ratio_high": 1e9}
    same(compute("erc", batch, **wide), compute("dapo", batch), batch)
    bounds = {"eps_clip": 0.2, "eps_clip_high": 0.28}
    same(compute("erc", batch, surrogate="gppo", **wide), compute("gppo", batch, **bounds), batch)


def test_settings_that_change_an_objective_equal_its_twin():
    batch = random_batch(8, spread=0.4)
    view = twin_batch(batch)
    cases = {
        "lp_reg": ({"rho": 0.5, "proxy_threshold": 0.3}, further.lp_reg(view, 0.3, rho=0.5)),
        "erc": (
            {"surrogate": "gppo", "eps_clip_high": 0.2},
            twins.entropy_clipped(view, twins.ce_gppo(view, 1.0, 1.0)),
        ),
    }
    for name, (settings, expected) in cases.items():
        found = losses.compute(name, batch, **settings)
        same(found, reduced(expected, batch, TOKEN), batch)


@pytest.mark.parametrize("name", ["grpo_clip_b", "grpo_clip_v"])
def test_a_dual_clip_of_three_bounds_large_ratios(name):
    """A < 0 and r > 3: the loss is -3 A, without a gradient."""
    batch = random_batch(4, spread=0.1)
    batch["old_log_prob"] = (batch["log_prob"] - math.log(5.0)).detach()
    batch["advantages"] = -torch.ones_like(batch["advantages"])
    found = losses.compute(name, batch)
    assert float(found.detach()) == pytest.approx(3.0)
    assert not gradients(found, batch)[0].any()


def test_stares_weights_compose_with_another_loss():
    batch = random_batch(6, spread=0.4)
    options = {"variant": "C2", "gate": False, "reweight_w": 1.5, "reweight_m": 0.5}
    composed = losses.compute("ce_gppo", batch, reweight="stare", **options)
    view = twin_batch(batch)
    weights = {
        x: float(loss)
        for x, loss in further.stare(dataclasses.replace(view, old=view.log_prob)).items()
    }
    # on-policy STARE's loss is -omega A: omega by the twin, 1.1 and 0.9 made 1.5 and 0.5
    omega = {x: loss / -view.a(x) if view.a(x) else 1.0 for x, loss in weights.items()}
    omega = {x: {1.1: 1.5, 0.9: 0.5}.get(round(w, 6), 1.0) for x, w in omega.items()}
    assert set(omega.values()) == {1.5, 0.5, 1.0}
    expected = reduced({x: omega[x] * v for x, v in twins.ce_gppo(view).items()}, batch, TOKEN)
    same(composed, expected, batch)
    same(
        losses.compute("dapo", batch, reweight="stare", **options),
        losses.compute("stare", batch, **options),
        batch,
    )
    with pytest.raises(UserError, match="weigh twice"):
        losses.compute("stare", batch, reweight="stare")


PENALISED = {"aent": {}, "entro_reg": {}, "entropic": {"probability_threshold": 0.05}}
PENALISED |= {"epo": {}, "siren": {"anchor": 0.2}, "skywork_or1": {"coefficient": 0.3}}


@pytest.mark.parametrize("name", PENALISED)
def test_importance_weights_leave_an_entropy_term_alone(name):
    """verl weighs the surrogate; the entropy term is a loss of its own."""
    batch = random_batch(5)
    clips = {"eps_clip": 0.2, "eps_clip_high": 0.2, "eps_clip_c": 3.0, "aggregation": TOKEN}
    weight = torch.rand(batch["log_prob"].shape, dtype=torch.float64)
    found, surrogate = (
        [losses.compute(objective, own, **clips, **settings) for own in (batch, weighed)]
        for weighed in [batch | {"importance_weights": weight}]
        for objective, settings in ((name, PENALISED[name]), ("dapo", {}))
    )
    same(found[1] - found[0], surrogate[1] - surrogate[0], batch)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_plans_weights_multiply_the_loss_once(weighted, monkeypatch):
    """By themselves and under STARE's, whether the loss multiplies or leaves it to the registry."""

    def doubled(step):
        return LossPlan(weight_T=torch.full_like(step.advantage_T, 2.0))

    def own(tokens):
        loss = -tokens.advantage * tokens.log_prob
        return tokens.weight * loss if weighted else loss

    monkeypatch.setattr("megatron_stare.losses.registry._objectives", all_objectives())
    losses.policy_loss(plan=doubled, weighted=weighted)(own)
    batch, weights = random_batch(5), {"reweight": "stare", "gate": False, "reweight_w": 3.0}
    same(losses.compute("own", batch), 2 * losses.compute("gpg", batch), batch)
    plain = losses.compute("gpg", batch, **weights)
    same(losses.compute("own", batch, **weights), 2 * plain, batch)


def test_clip_cov_drops_the_drawn_tokens_alone():
    batch = random_batch(7)
    plain = losses.compute("clip_cov", batch, cov_low=1e9, cov_high=2e9)
    whole = torch.autograd.grad(plain, batch["log_prob"], retain_graph=True)[0]
    same(plain, losses.compute("grpo", batch, eps_clip=1.0), batch)
    view = twin_batch(batch)
    found = further.covariances(view)
    candidates = [
        x for x in view.places if 0.2 < found[x] < 5 and not (view.a(x) > 0 and view.r(x) > 2)
    ]
    everything = losses.compute("clip_cov", batch, cov_low=0.2, cov_share=1.0)
    kept = {x: v * (x not in candidates) for x, v in twins.clipped(view, 1.0, 1.0).items()}
    same(everything, reduced(kept, batch, TOKEN), batch)
    share = 3 / len(view.places)
    slopes = [
        gradients(losses.compute("clip_cov", batch, cov_low=0.2, cov_share=share, seed=s), batch)[0]
        for s in (0, 0, 1)
    ]
    dropped = [int(((slope == 0) & (whole != 0)).sum()) for slope in slopes]
    # a drawn token with A = 0 had no slope to lose
    assert all(1 <= count <= 3 for count in dropped) and torch.equal(slopes[0], slopes[1])
    assert not torch.equal(slopes[0], slopes[2])


def test_the_controller_of_aent_moves_after_its_warm_up():
    """Steps count from 0, and step number `warmup` still keeps the coefficient."""
    batch, state = random_batch(8), dict[str, float]()
    found = []
    for _ in range(4):
        losses.compute("aent", batch, state=state, adaptive=True, warmup=2)
        found.append(state["coefficient"])
    assert found[:3] == [1e-3] * 3 and found[3] < 1e-3


def test_controllers_move_once_per_step():
    batch = random_batch(8)  # Hbar about 1.4 nats
    state: dict[str, float] = {}
    losses.compute("skywork_or1", batch, state=state, target=2.0)
    assert state == {"coefficient": pytest.approx(1e-4), "gate": 1.0}
    losses.compute("skywork_or1", batch, state=state, target=0.1)
    assert state == {"coefficient": 0.0, "gate": 0.0}
    state = {}
    for zeta in (2e-3, 4e-3):
        losses.compute("repo_r", batch, state=state, target=2.0)
        assert state["zeta"] == pytest.approx(zeta)
    for zeta in (2e-3, 1e-3, 5e-4, 2.5e-4, 1.25e-4, -1e-4, -2e-4):
        losses.compute("repo_r", batch, state=state, target=0.1)
        assert state["zeta"] == pytest.approx(zeta)
    state = {}
    bounds = {"change": 0.1, "high_min": 0.1, "high_max": 0.4}
    for high in (0.38, 0.4):
        losses.compute("adapo", batch, state=state, target=2.0, **bounds)
        assert state["eps_high"] == pytest.approx(high)
    state = {}
    entropy = further.mean_entropy(twin_batch(batch))
    for steps in (1, 2):
        losses.compute("entropic", batch, state=state, target=0.1)
        assert state["error_sum"] == pytest.approx(steps * (entropy - 0.1))
    state = {"step": 7.0}
    losses.compute("positive_reweighting", batch, state=state, total_steps=10)
    assert state == {"step": 8.0, "positive_weight": pytest.approx(0.4)}
    schedule = {"schedule": "epoch", "epochs": 5, "total_steps": 10}
    losses.compute("positive_reweighting", batch, state=state, **schedule)
    assert state["positive_weight"] == pytest.approx(4 / 4)
    guided = {"schedule": "entropy", "initial": 0.5}
    losses.compute("positive_reweighting", batch, state=(state := {}), **guided)
    assert state["positive_weight"] == pytest.approx(0.55), "Hbar over 0.2"


@pytest.mark.parametrize(
    ("name", "setting", "values", "kept"),
    [
        ("aent", "coefficient", (1e-3, 0.5), "coefficient"),
        ("siren", "anchor", (0.3, 0.7), "anchor"),
        ("adapo", "target", (9.0, 0.1), "eps_high"),
    ],
)
def test_a_changed_setting_counts_in_a_resumed_run(name, setting, values, kept):
    """What a controller keeps between steps does not hide what the configuration says now."""
    batch, state = random_batch(8), dict[str, float]()
    fixed = {"change": 0.05, "high_min": 0.1, "high_max": 0.4} if name == "adapo" else {}
    found = []
    for value in values:
        losses.compute(name, batch, state=state, **fixed, **{setting: value})
        found.append(state[kept])
    expected = values if setting == kept else (0.33, 0.28)  # up to a high target, then down
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("stair", {}, "did you mean 'stare'"),
        ("steer", {"w_mim": 0.7}, "did you mean 'w_min'"),
        ("steer", {"w_min": "low"}, "loss.settings.w_min=low is not of type float"),
        ("steer", {"w_min": -1.0}, "out of range"),
        ("steer", {"mapping": "square"}, "linear, exp"),
        ("arm", {}, "needs loss.settings.alpha"),
        ("minpro", {}, "needs loss.eps_clip"),
        ("gpg", {"eps_clip": 0.2}, "loss.eps_clip=0.2 has no effect: the objective gpg"),
        ("gpg", {"gate": False}, "loss.gate=false has no effect: the objective gpg"),
        ("dapo", {"reweight_w": 1.1}, "does not read it; remove it, or use one that does: stare"),
        ("dapo", {"target_entropy": 0.3}, "target_entropy has no effect"),
        ("dapo", {"eps_clip": float("nan")}, "out of range"),
        ("positive_reweighting", {}, "total_steps"),
    ],
)
def test_settings_that_do_not_fit_are_named(name, settings, message):
    with pytest.raises(UserError, match=message):
        losses.compute(name, random_batch(), **settings)


@pytest.mark.parametrize(
    ("name", "missing", "message"),
    [
        ("dapo", ("log_prob",), "log_prob"),
        ("stare", ("entropy", "logits"), "needs batch\\['entropy'\\]"),
        ("aent", ("logits",), "needs batch\\['logits'\\]"),
        ("grpo_clip_v", ("logits",), "needs batch\\['logits'\\]"),
        ("arm", ("group_ids",), "group_ids"),
        ("dcpo_distribution", ("rewards",), "rewards"),
        ("dcpo_distribution", ("logits",), "tempered_log_prob.* divided by 1.2"),
        ("epo", ("entropy", "logits"), "needs batch\\['entropy'\\]"),
    ],
)
def test_missing_tensors_of_a_batch_are_named(name, missing, message):
    batch = {key: value for key, value in random_batch().items() if key not in missing}
    with pytest.raises(UserError, match=message):
        losses.compute(name, batch, **CASES[name][2])
    with pytest.raises(ValueError, match="shape"):
        losses.compute("dapo", random_batch() | {"entropy": torch.ones(2, 3)})
    with pytest.raises(UserError, match="did you mean 'log_prob'"):
        losses.compute("dapo", random_batch() | {"log_probs": torch.ones(2, 3)})
