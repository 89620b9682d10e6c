"""Every objective with its tokens on two ranks, sequences split between them, as in one process."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from megatron_stare.config import LossConfig
from megatron_stare.losses import objective_of
from megatron_stare.losses.registry import all_objectives
from megatron_stare.numerics.selection import Across
from megatron_stare.numerics.sequences import sequence_scan, sequence_sum
from megatron_stare.records import LossTokens, TokenBatch
from tests.distributed import run_distributed

COUNT, SEQUENCES, VOCABULARY = 240, 14, 9
CLIPS = {"eps_clip": 0.2, "eps_clip_high": 0.2}
# What must be set, and what gives each plan something to choose.
SETTINGS: dict[str, dict[str, Any]] = {
    "minpro": CLIPS,
    "arm": {"settings": {"alpha": 0.1}},
    "repo_r": {"settings": {"target": 1.0}},
    "adapo": {"settings": {"change": 0.01, "high_min": 0.1, "high_max": 0.5}},
    "entropic": {"settings": {"probability_threshold": 0.3}},
    "epo": {"settings": {"first_turn": 1}},
    "clip_cov": {"settings": {"cov_low": 0.1, "cov_share": 0.1}},
    "kl_cov": {"settings": {"cov_share": 0.1}},
    "lp_reg": {"settings": {"rho": 0.5}},
    "positive_reweighting": {"settings": {"schedule": "entropy", "initial": 0.5}},
    "siren": {"settings": {"anchor": 0.7}},
    "skywork_or1": {"settings": {"coefficient": 0.004}},
    "grpo_clip_v": {"settings": {"mu": 0.5, "max_share": 0.05}},
    "grpo_clip_b": {"settings": {"mu": 0.5}},
    "stapo": {"settings": {"probability_threshold": 0.5}},
    "stare": {"variant": "C2", "target_entropy": 10.0, "select": "sensitivity"},
}
CASES: dict[str, LossConfig] = {
    name: LossConfig(**{"name": name, "padded_length": 40} | SETTINGS.get(name, {}))
    for name in all_objectives()
}
CASES["entropic by micro-batches"] = LossConfig(
    name="entropic", settings={"probability_threshold": 0.3, "error_of": "microbatch"}
)
CASES["epo by turns"] = LossConfig(
    name="epo", settings={"first_turn": 3, "mode": "seq", "seq_mean": "tokens"}
)
CASES["composed"] = LossConfig(name="ce_gppo", reweight="stare", gate=False)
CASES["rising"] = LossConfig(variant="C2", target_entropy=10.0, select="rising", top_p_ratio=0.4)
CASES["critical"] = LossConfig(controller="critical", target_entropy=10.0, w_max=9.0)


def columns() -> dict[str, torch.Tensor]:
    """All tokens: 14 sequences of uneven length in groups of two, one advantage each."""
    dice = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=dice, dtype=torch.float64)

    sequence = torch.randint(SEQUENCES - 1, (COUNT,), generator=dice).sort().values
    place = torch.arange(COUNT) - torch.searchsorted(sequence, sequence)
    surprisal = normal(COUNT).abs() + 0.02
    return {
        "advantage_T": normal(SEQUENCES)[sequence],
        "rollout_logprob_T": -(surprisal + 0.2 * normal(COUNT)).clamp(min=0.01),
        "sequence_T": sequence,
        "sequence_tokens_T": torch.bincount(sequence)[sequence],
        "token_index_T": (sequence << 32) + 2 * place,
        "microbatch_T": torch.zeros(COUNT, dtype=torch.long),
        "fresh_T": torch.ones(COUNT, dtype=torch.bool),
        "turn_T": (place // 7).int(),
        "surprisal_T": surprisal,
        "entropy_T": normal(COUNT).abs() + 0.01,
        "sensitivity_T": normal(COUNT),
        "nucleus_entropy_T": normal(COUNT).abs(),
        "tempered_T": 0.3 * normal(COUNT),
        "proxy_mass_T": torch.where(normal(COUNT) > 0, -0.5, torch.inf).double(),
        "old_surprisal_T": (surprisal + 0.4 * normal(COUNT)).clamp(min=0.01),
        "old_entropy_T": normal(COUNT).abs() + 0.01,
        "logits_T": normal(COUNT, VOCABULARY),
    }


def share_of(rank: int, world_size: int) -> torch.Tensor:
    """This rank's tokens: chunks of three in turn, so that sequences lie on both."""
    return (torch.arange(COUNT) // 3) % world_size == rank


def measured(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """The results of every case: loss, this rank's slopes by surprisal and entropy, metrics and
    state.
    """
    import torch.distributed as dist

    group = dist.group.WORLD if world_size > 1 else None
    mine = share_of(rank, world_size)
    local = {name: value[mine] for name, value in columns().items()}
    logits = local.pop("logits_T")
    reward_Q = torch.arange(SEQUENCES).double().fmod(3)
    group_Q = torch.arange(SEQUENCES) // 2
    batch = TokenBatch((), num_sequences=SEQUENCES, group_Q=group_Q, reward_Q=reward_Q, **local)
    shared = {"sequence_N": batch.sequence_T, "count": SEQUENCES, "group": group}
    position = batch.token_index_T & 0xFFFFFFFF
    found = {}
    for name, config in CASES.items():
        objective = objective_of(config)
        signals = objective.plan(batch, config, Across(group), {})
        assert batch.surprisal_T is not None and batch.entropy_T is not None
        assert batch.old_surprisal_T is not None
        surprisal = batch.surprisal_T.clone().requires_grad_()
        entropy = batch.entropy_T.clone().requires_grad_()
        tokens = LossTokens(
            surprisal,
            entropy,
            batch.old_surprisal_T,
            batch.advantage_T,
            signals.weight_T,
            old_entropy=batch.old_entropy_T,
            rollout_surprisal=-batch.rollout_logprob_T,
            values=signals.values,
            numbers=signals.numbers,
            logits=logits,
        )
        tokens = dataclasses.replace(
            tokens,
            sequence=batch.sequence_T,
            sequence_tokens=batch.sequence_tokens_T,
            position=position,
            sequence_sum=functools.partial(sequence_sum, **shared),
            sequence_scan=functools.partial(sequence_scan, position_N=position, **shared),
        )
        loss = (signals.coefficient_T * objective.bind(config).function(tokens)).sum()
        slopes = torch.autograd.grad(
            loss, (surprisal, entropy), allow_unused=True, materialize_grads=True
        )
        found[name] = {
            "loss": float(loss.detach()),
            "slopes": torch.stack(slopes),
            "numbers": signals.metrics | {f"state {k}": v for k, v in signals.state.items()},
        }
    return found


@pytest.fixture(scope="module")
def runs() -> tuple[dict[str, dict[str, Any]], list[dict[str, dict[str, Any]]]]:
    return measured(0, 1), run_distributed(measured, 2)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_make_the_step_of_one(
    runs: tuple[dict[str, dict[str, Any]], list[dict[str, dict[str, Any]]]], name: str
) -> None:
    alone, ranks = runs
    expected = alone[name]
    assert bool((expected["slopes"] != 0).any())
    assert sum(rank[name]["loss"] for rank in ranks) == pytest.approx(expected["loss"], rel=1e-9)
    for number, rank in enumerate(ranks):
        mine = share_of(number, 2)
        torch.testing.assert_close(
            rank[name]["slopes"], expected["slopes"][:, mine], rtol=1e-8, atol=1e-11
        )
        assert rank[name]["numbers"] == pytest.approx(expected["numbers"], rel=1e-9, abs=1e-12)


def test_the_plans_select_tokens(
    runs: tuple[dict[str, dict[str, Any]], list[dict[str, dict[str, Any]]]],
) -> None:
    """Otherwise the ranks would agree because they select no token."""
    for name, result in runs[0].items():
        for key, value in result["numbers"].items():
            if key.endswith("_fraction"):
                assert 0 < value < 1, (name, key)
