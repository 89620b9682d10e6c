"""Episodes of agents: an episode that is split into sequences at any of its calls has the gradient
of the episode in one sequence, on one rank and on two.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_stare.config import Config, LossConfig, PolicyConfig, override
from megatron_stare.losses import find_objective
from megatron_stare.losses.planning import coefficients
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.actor import Actor, _loss_tokens
from megatron_stare.policy.packing import pack
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Group, Prompt, Rollout, TokenBatch, trained_sequences
from tests.distributed import run_distributed
from tests.tiny_models import tiny_config, write_checkpoint

CALLS, SAMPLED, INSERTED, PROMPT = 20, 2, 1, 3
# Numbers of the calls that begin a sequence of their own; the first one always does.
SPLITS: dict[str, tuple[int, ...] | None] = {
    "plain": None,  # a prompt and one response
    "one": (0,),
    "two": (0, 7),
    "every call": tuple(range(CALLS)),
}
LOSSES = {
    "token mean": LossConfig(name="dapo", aggregation="token-mean"),
    "sequence mean": LossConfig(name="dapo", aggregation="seq-mean-token-mean"),
    "sequence sum": LossConfig(name="dapo", aggregation="seq-mean-token-sum"),
    "stare": LossConfig(name="stare", aggregation="seq-mean-token-mean"),
}
LAYOUTS: dict[str, tuple[str, ...]] = {
    "DP2": (),
    "CP2": ("policy.context_parallel_size=2",),
    "PP2 padded": ("policy.pipeline_model_parallel_size=2", "policy.packed_sequences=false"),
}


def episode(ids: list[int], calls: int, split: tuple[int, ...] | None, advantage: float) -> Rollout:
    """Calls of SAMPLED sampled tokens and INSERTED inserted ones; the history begins with the
    prompt. Every sequence holds the whole history before its calls.
    """
    mask = ([1] * SAMPLED + [0] * INSERTED) * calls
    common: dict[str, Any] = {
        "status": "completed",
        "weight_version": 0,
        "advantage": advantage,
        "reward": advantage,
        "verdict": "correct",
    }
    if split is None:
        response = ids[PROMPT:]
        return Rollout(response, [-4.0] * len(mask), mask, **common)
    begins = [call for call in split if call < calls]
    own, lengths, all_ids = [], [], []
    step = SAMPLED + INSERTED
    for begin, end in itertools.pairwise([*begins, calls]):
        stop = PROMPT + end * step
        all_ids += ids[:stop]
        own += [0] * (PROMPT + begin * step) + mask[begin * step : end * step]
        lengths.append(stop)
    logprobs = [-4.0 * each for each in own]
    return Rollout(all_ids, logprobs, own, lengths=tuple(lengths), **common)


def groups_of(split: tuple[int, ...] | None) -> list[Group]:
    """Three groups of two episodes, of 1 to CALLS calls."""
    dice = torch.Generator().manual_seed(3)
    groups = []
    for number, calls in enumerate(((CALLS, 3), (1, 8), (5, 2))):
        prompt = torch.randint(1, 71, (PROMPT,), generator=dice).tolist()
        rollouts = []
        for count, advantage in zip(calls, (1.0 + number / 10, -0.5), strict=True):
            size = (SAMPLED + INSERTED) * count
            ids = prompt + torch.randint(1, 71, (size,), generator=dice).tolist()
            rollouts.append(episode(ids, count, split, advantage))
        groups.append(Group(Prompt(number, prompt, ""), tuple(rollouts)))
    return groups


def identities(batch: TokenBatch) -> list[tuple[int, int]]:
    """For every loss token of one rank: its rollout, and its number among that rollout's."""
    order = torch.argsort(batch.token_index_T)
    counted: dict[int, int] = {}
    found: dict[int, tuple[int, int]] = {}
    for place in order.tolist():
        rollout = int(batch.sequence_T[place])
        found[place] = (rollout, counted.get(rollout, 0))
        counted[rollout] = found[place][1] + 1
    return [found[place] for place in range(len(order))]


def test_every_sampled_token_is_a_loss_token_once() -> None:
    for split in SPLITS.values():
        groups = groups_of(split)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        assert [each.loss_tokens for each in rollouts] == [40, 6, 2, 16, 10, 4]
        trained = trained_sequences(groups)
        assert sum(each.rollout.loss_tokens for each in trained) == 78
        assert [each.loss_tokens for each in trained] == [
            rollouts[each.number].loss_tokens for each in trained
        ]
    assert len(trained) == 20 + 3 + 1 + 8 + 5 + 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": (5, 5)}, "add up"),
        ({"lengths": (9, 0)}, "positive"),
        ({"loss_mask": [0, 1, 0, 1, 1, 0, 0, 0, 0], "lengths": (3, 6)}, "token 3 begins"),
        ({"lengths": (9,), "routing": [1, 2]}, "routing"),
    ],
)
def test_impossible_sequences_are_refused(change: dict[str, Any], message: str) -> None:
    plain = Rollout([1] * 9, [0.0] * 9, [0] * 9, status="completed", weight_version=0)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(plain, **change)


def updated(
    directory: Path, topology: Topology, name: str, split: str, options: Sequence[str] = ()
) -> dict[str, Any]:
    """One update. With an epsilon of 1 Adam's first step is g / (|g| + 1): the weights show the
    gradient.
    """
    common = ("policy.max_tokens_per_gpu=400", "optimizer.lr=1", "optimizer.adam_eps=1")
    paths = (f"policy.hf_checkpoint={directory}", "optimizer.clip_grad=1e6")
    actor = Actor(override(Config(), [*paths, *common, *options]), topology, total_steps=10)
    batch = actor.score(actor.pack(groups_of(SPLITS[split]), 0), sensitivity=True)
    loss = LOSSES[name]
    objective = find_objective(loss.name)
    signals = objective.plan(batch, loss, topology.across, {})
    metrics, _ = actor.update(batch, objective.bind(loss), signals)
    assert batch.num_sequences == 6, "a sequence of the loss is an episode"
    return {"weights": {key: tensor.clone() for key, tensor in actor.weights()}} | metrics


def packed(topology: Topology, split: str) -> TokenBatch:
    policy = PolicyConfig(max_tokens_per_gpu=400)
    return pack(groups_of(SPLITS[split]), topology, policy, hidden_size=16, weight_version=0)


def in_float64(
    batch: TokenBatch, loss: LossConfig, topology: Topology
) -> dict[tuple[int, int], list[float]]:
    """For every token of one rank: the gradient of the batch's loss to its surprisal, and the parts
    of this gradient; the scores are functions of the token's identity.
    """
    own = identities(batch)
    dice = torch.Generator().manual_seed(11)
    table = torch.rand(6, 40, 4, generator=dice, dtype=torch.float64)
    score_T4 = torch.stack([table[identity] for identity in own])
    doubled: dict[str, Tensor] = {
        each.name: value.double()
        for each in dataclasses.fields(batch)
        if isinstance(value := getattr(batch, each.name), Tensor) and value.is_floating_point()
    }
    scores = {
        "surprisal_T": 3 * score_T4[:, 0],
        "entropy_T": 2 * score_T4[:, 1],
        "sensitivity_T": score_T4[:, 2] - 0.5,
        "old_surprisal_T": 3 * score_T4[:, 0] + 0.4 * (score_T4[:, 3] - 0.5),
    }
    batch = dataclasses.replace(batch, **(doubled | scores))
    objective = find_objective(loss.name)
    signals = objective.plan(batch, loss, topology.across, {})
    assert batch.surprisal_T is not None
    live = batch.surprisal_T.clone().requires_grad_()
    every = slice(0, len(own))
    tokens = _loss_tokens(live, batch.entropy_T, batch, signals, every)  # type: ignore[arg-type]
    (signals.coefficient_T * objective.bind(loss).function(tokens)).sum().backward()
    assert live.grad is not None and batch.turn_T is not None
    columns = [live.grad, signals.coefficient_T, signals.weight_T, batch.advantage_T, batch.turn_T]
    return dict(zip(own, torch.stack([c.double() for c in columns], 1).tolist(), strict=True))


def under_each_layout(rank: int, world_size: int, directory: Path) -> dict[Any, Any]:
    """The updates on episodes in many sequences."""
    found = {}
    for layout, options in LAYOUTS.items():
        topology = topologies.start(override(Config(), options).policy)
        for name in LOSSES:
            found[layout, name] = updated(directory, topology, name, "every call", options)
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"num_hidden_layers": 2}
    return write_checkpoint(tmp_path_factory.mktemp("model"), tiny_config("qwen2", **shape), seed=5)


@pytest.fixture(scope="module")
def ranks(checkpoint: Path) -> list[dict[Any, Any]]:
    return run_distributed(under_each_layout, 2, checkpoint)


@pytest.mark.parametrize("name", LOSSES)
def test_splitting_an_episode_changes_no_tokens_gradient(topology: Topology, name: str) -> None:
    plain = in_float64(packed(topology, "plain"), LOSSES[name], topology)
    assert len(plain) == 78 and any(gradient for gradient, *_ in plain.values())
    for split in SPLITS:
        found = in_float64(packed(topology, split), LOSSES[name], topology)
        assert found.keys() == plain.keys()
        for token, values in plain.items():
            assert found[token] == pytest.approx(values, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("name", LOSSES)
def test_splitting_an_episode_changes_no_update(
    checkpoint: Path, topology: Topology, ranks: list[dict[Any, Any]], name: str
) -> None:
    """On one rank, and on two under every layout."""
    plain = updated(checkpoint, topology, name, "plain")
    assert plain["grad_norm"] > 1e-3
    for split in ("one", "two", "every call") if name == "token mean" else ("every call",):
        assert_same_update(updated(checkpoint, topology, name, split), plain)
    for rank in ranks:
        for layout in LAYOUTS:
            assert_same_update(rank[layout, name], plain)


def assert_same_update(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert found["loss"] == pytest.approx(plain["loss"], rel=2e-5, abs=1e-6)
    assert found["grad_norm"] == pytest.approx(plain["grad_norm"], rel=2e-5)
    tolerance = 2e-6 * max(1.0, plain["grad_norm"])
    for key, tensor in plain["weights"].items():
        torch.testing.assert_close(
            found["weights"][key], tensor, rtol=2e-5, atol=tolerance, msg=key
        )


def test_gspo_keeps_token_weights_and_takes_each_sequences_ratio(topology: Topology) -> None:
    """Its coefficients, and the number of tokens that the mean of its ratio is over."""
    coefficient, count = {}, {}
    for split in SPLITS:
        batch = packed(topology, split)
        own = identities(batch)
        found_T = coefficients(batch, "seq-mean-token-mean", topology.across)
        coefficient[split] = dict(zip(own, found_T.tolist(), strict=True))
        count_T = torch.cat([each.loss_tokens_B[each.sequence_N] for each in batch.microbatches])
        count[split] = dict(zip(own, count_T.tolist(), strict=True))
    assert all(coefficient[split] == coefficient["plain"] for split in SPLITS)
    assert count["plain"][0, 0] == count["one"][0, 0] == 40
    assert count["two"][0, 0] == 14 and count["two"][0, 39] == 26
    assert set(count["every call"].values()) == {SAMPLED}
