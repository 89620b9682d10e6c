"""Every objective under layouts of two ranks against one rank: plan, loss and gradient."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_stare.config import Config, override
from megatron_stare.losses import PROXY_KAPPA, objective_of
from megatron_stare.losses.registry import all_objectives
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.actor import Actor
from tests.distributed import run_distributed
from tests.loop.test_learn_objectives import REQUIRED
from tests.policy.test_actor_sequences import old_surprisals, rounds_of_groups
from tests.tiny_models import tiny_config, write_checkpoint

SMALL = "policy.max_tokens_per_gpu=28"
CP, TP = "policy.context_parallel_size=2", "policy.tensor_model_parallel_size=2"
LAYOUTS: dict[int, dict[str, tuple[str, ...]]] = {
    1: {"one": (), "micro-batches": (SMALL, "policy.packed_sequences=false")},
    2: {"CP2": (CP,), "DP2": (SMALL,), "TP2": (TP,)},
}
# What the random ratios and entropies of a random model leave something to do for.
SETTINGS = {
    "entropic": ("loss.settings.probability_threshold=0.01",),
    "clip_cov": ("loss.settings.cov_low=0.1", "loss.settings.cov_share=0.1"),
    "kl_cov": ("loss.settings.cov_share=0.1",),
    "lp_reg": ("loss.settings.rho=0.5",),
    "positive_reweighting": ("loss.settings.schedule=entropy", "loss.settings.initial=0.5"),
    "skywork_or1": ("loss.settings.coefficient=0.1",),
    "stare": ("loss.variant=C2", "loss.target_entropy=10", "loss.select=sensitivity"),
}
MORE = {"ce_gppo, STARE's weights": ("loss.name=ce_gppo", "loss.reweight=stare", "loss.gate=false")}
MORE |= {"critical": ("loss.controller=critical", "loss.target_entropy=10", "loss.w_max=9")}
NAMES = [*all_objectives(), *MORE]


def measured(rank: int, world_size: int, directory: str) -> dict[tuple[str, str], list[float]]:
    """(layout, objective) -> loss, gradient norm and the plan's metrics; no weight moves."""
    found = {}
    for layout, options in LAYOUTS[world_size].items():
        fixed = (f"policy.hf_checkpoint={directory}", "policy.max_tokens_per_gpu=2000")
        fixed += ("optimizer.lr=0", "optimizer.clip_grad=1e9", "loss.padded_length=24")
        config = override(Config(), [*fixed, *options])
        topology = topologies.start(config.policy)
        actor = Actor(config, topology, total_steps=10)
        batch = actor.pack(rounds_of_groups(), 0)
        batch = actor.score(batch, sensitivity=True, proxy_kappa=PROXY_KAPPA)
        assert batch.entropy_T is not None
        old_T = old_surprisals(batch).float()
        batch = dataclasses.replace(
            batch,
            old_surprisal_T=old_T,
            rollout_logprob_T=-old_T,
            old_entropy_T=1.02 * batch.entropy_T,
        )
        for name in NAMES:
            chosen = MORE.get(name, (f"loss.name={name}",))
            own = override(config, [*chosen, *REQUIRED.get(name, ()), *SETTINGS.get(name, ())]).loss
            objective = objective_of(own)
            signals = objective.plan(batch, own, topology.across, {})
            metrics, _ = actor.update(batch, objective.bind(own), signals)
            sums = [signals.metrics[key] for key in sorted(signals.metrics)]
            found[layout, name] = [metrics["loss"], metrics["grad_norm"], *sums]
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[list[float]]]:
    shape = {"num_hidden_layers": 1}
    path = write_checkpoint(tmp_path_factory.mktemp("model"), tiny_config("qwen2", **shape), seed=5)
    found: dict[tuple[str, str], list[list[float]]] = {}
    for size in LAYOUTS:
        ranks = run_distributed(measured, size, str(path))
        found |= {key: [rank[key] for rank in ranks] for key in ranks[0]}
    return found


@pytest.mark.parametrize("layout", [layout for size in LAYOUTS.values() for layout in size][1:])
def test_loss_and_gradient_are_those_of_one_rank(
    runs: dict[tuple[str, str], list[list[float]]], layout: str
) -> None:
    for name in NAMES:
        (expected,) = runs["one", name]
        assert expected[1] > 0, name
        for found in runs[layout, name]:
            assert found == pytest.approx(expected, rel=2e-5, abs=1e-6), name


def test_the_objectives_differ(runs: dict[tuple[str, str], list[list[float]]]) -> None:
    """Or a plan that does nothing would pass."""
    norms = {name: runs["one", name][0][1] for name in NAMES}
    alike = {"grpo_ds", "just_rl", "steer_linear", "dppo_tv", "w_reinf", "grpo_clip_b"}
    alike |= {"grpo_clip_v", "stapo", "adapo"}  # nothing to leave out of so small a batch
    named = [round(norm, 6) for name, norm in norms.items() if name not in alike]
    assert len(set(named)) > 0.85 * len(named)
