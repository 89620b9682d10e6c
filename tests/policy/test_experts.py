"""Routing replay and the load-balancing loss: log-probs, gradients and counts against transformers
in float64 with the same choices, under every layout; choices given, recorded, and partly unknown.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file

from megatron_stare.collect.rounds import scatter_groups
from megatron_stare.config import Config, UserError, override
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.build import read_hf_config
from megatron_stare.policy.experts import routing_shape
from megatron_stare.records import (
    BoundLoss,
    Group,
    Prompt,
    Rollout,
    RoutingShape,
    Signals,
    TokenBatch,
)
from tests.distributed import run_distributed
from tests.policy.reference_experts import ForcedExperts
from tests.policy.test_model_experts import transformers_gradient
from tests.tiny_models import tiny_config, write_checkpoint

TP, PP, CP, EP = (
    f"policy.{name}_parallel_size=2"
    for name in ("tensor_model", "pipeline_model", "context", "expert_model")
)
SP, VPP = "policy.sequence_parallel=true", "policy.virtual_pipeline_model_parallel_size=2"
PADDED, FULL = "policy.packed_sequences=false", "policy.recompute_granularity=full"
MODULES = ("policy.recompute_granularity=selective", "policy.recompute_modules=moe")
WHOLE = "policy.expert_tensor_parallel_size=1"
# Of one world, without the slow tests; of another one, with them.
QUICK = {
    2: {
        "TP2 SP EP2 padded": (TP, SP, EP, WHOLE, PADDED),
        "PP2 VPP2 recompute full": (PP, VPP, FULL),
        "CP2 EP2": (CP, EP),
    }
}
SLOW = {
    1: {
        "one": ("policy.max_tokens_per_gpu=2000",),
        "recompute full": (FULL,),
        "recompute experts, padded": (*MODULES, PADDED),
    },
    2: {"CP2 padded recompute full": (CP, PADDED, FULL), "EP2": (EP,)},
    4: {
        "TP2 SP PP2 VPP2 recompute full": (TP, SP, PP, VPP, FULL),
        "TP2 SP CP2 EP4": (TP, SP, CP, "policy.expert_model_parallel_size=4", WHOLE),
        "PP2 EP2 recompute experts": (PP, EP, *MODULES),
    },
}
SIGMOID = ("glm4_moe", "deepseek_v3")  # their bias balances, and there is no such loss
FAMILIES = ("qwen3_moe", "qwen3_moe_stepped", *SIGMOID)
COEFFICIENT = 0.7
REPLAY, BALANCE = "policy.routing_replay=rollout", f"policy.moe_aux_loss_coeff={COEFFICIENT}"
# Prompt tokens, response tokens, and of how many positions the choices are known.
SHAPES = ((4, 9, 12), (3, 20, 10), (7, 3, 0), (5, 12, 16), (9, 17, 25), (2, 6, 7))


def shape_of(directory: Path) -> RoutingShape:
    found = routing_shape(read_hf_config(str(directory)))
    assert found is not None
    return found


def made_groups(shape: RoutingShape) -> list[Group]:
    """One rollout each, their ids and their experts drawn at random."""
    dice = numpy.random.default_rng(4)
    groups = []
    for number, (prompt, count, known) in enumerate(SHAPES):
        ids = dice.integers(1, 71, prompt + count)
        orders = dice.permuted(
            numpy.tile(numpy.arange(shape.experts), (known, len(shape.layers), 1)), axis=-1
        )
        rollout = Rollout(
            ids[prompt:],
            numpy.full(count, -4.0, numpy.float32),
            numpy.ones(count, numpy.bool_),
            status="completed",
            weight_version=0,
            advantage=1.0 - number / 4,
            routing=shape.encoded(orders[..., : shape.top_k]),
        )
        groups.append(Group(Prompt(number, ids[:prompt], ""), (rollout,)))
    return groups


TOKENS = sum(count for _, count, _ in SHAPES)
SURPRISAL = BoundLoss(lambda tokens: tokens.advantage * tokens.surprisal)


def an_actor(directory: Path, *options: str) -> Actor:
    """Adam's first step with an epsilon of 1 is g / (|g| + 1): the weights show the gradient."""
    common = ("policy.max_tokens_per_gpu=60", "optimizer.lr=1", "optimizer.adam_eps=1")
    common += ("optimizer.clip_grad=1e6", "optimizer.weight_decay=0")
    config = override(Config(), [f"policy.hf_checkpoint={directory}", *common, *options])
    return Actor(config, topologies.start(config.policy), total_steps=10)


def signals_of(batch: TokenBatch) -> Signals:
    assert batch.surprisal_T is not None
    one_T = torch.ones_like(batch.surprisal_T)
    return Signals(coefficient_T=one_T / TOKENS, weight_T=one_T, state={})


def update(directory: Path, options: tuple[str, ...]) -> dict[str, Any]:
    """One update from the checkpoint, each rank holding some of the rollouts."""
    actor = an_actor(directory, *options)
    groups = scatter_groups(made_groups(shape_of(directory)), actor.topology)
    batch = actor.score(actor.pack(groups, 0))
    signals = signals_of(batch)
    assert actor.routers is not None and batch.surprisal_T is not None
    load = actor.routers.load_metrics()
    metrics, _ = actor.update(batch, SURPRISAL, signals)
    return {
        "surprisal": dict(
            zip(batch.token_index_T.tolist(), batch.surprisal_T.tolist(), strict=True)
        ),
        "load": load,
        "metrics": metrics,
        "weights": {name: tensor.clone() for name, tensor in actor.weights()},
    }


def under_each_layout(
    rank: int, size: int, directories: dict[str, Path], layouts: dict[str, tuple[str, ...]]
) -> dict[Any, Any]:
    return {
        (layout, family): update(
            directory, (*options, REPLAY, *((BALANCE,) if family not in SIGMOID else ()))
        )
        for layout, options in layouts.items()
        for family, directory in directories.items()
    }


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("routed")
    return {
        family: write_checkpoint(root / family, tiny_config(family), seed)
        for seed, family in enumerate(FAMILIES)
    }


class Twin:
    """The same update in float64: surprisals, gradients, and the load of the experts."""

    def __init__(self, directory: Path, coefficient: float) -> None:
        shape, forced = shape_of(directory), ForcedExperts(directory)
        self.surprisal, total, choices = dict[int, float](), torch.zeros(()).double(), []
        probabilities = []
        for scored in forced.scored(made_groups(shape), shape):
            self.surprisal |= scored.surprisal
            total = total - scored.gain / TOKENS
            choices.append(torch.stack(forced.chosen, 1))
            probabilities.append(torch.stack(forced.probability, 1))
        probability_TLE, chosen_TLK = torch.cat(probabilities), torch.cat(choices)
        count, layers, experts = probability_TLE.shape
        self.tokens = torch.zeros(layers, experts, dtype=torch.float64)
        for token in chosen_TLK:
            for layer, chosen in enumerate(token.tolist()):
                for expert in chosen:
                    self.tokens[layer, expert] += 1
        share = self.tokens / (shape.top_k * count)
        self.balance = experts * (share * probability_TLE.mean(0)).sum(1)
        (total + coefficient * self.balance.sum()).backward()
        self.gradient = {name: p.grad for name, p in forced.model.named_parameters()}


@pytest.fixture(scope="module")
def twins(checkpoints: dict[str, Path]) -> dict[str, Twin]:
    return {
        family: Twin(directory, 0.0 if family in SIGMOID else COEFFICIENT)
        for family, directory in checkpoints.items()
    }


class Runs(dict[tuple[int, bool], list[dict[Any, Any]]]):
    """The results of each rank of a world of this size, quick or slow, made on request."""

    def __init__(self, checkpoints: dict[str, Path]) -> None:
        super().__init__()
        self.checkpoints = checkpoints

    def __missing__(self, key: tuple[int, bool]) -> list[dict[Any, Any]]:
        size, slow = key
        layouts = (SLOW if slow else QUICK)[size]
        self[key] = run_distributed(under_each_layout, size, self.checkpoints, layouts)
        return self[key]


@pytest.fixture(scope="module")
def runs(checkpoints: dict[str, Path]) -> Runs:
    return Runs(checkpoints)


CASES = [
    pytest.param((size, slow), layout, family, marks=[pytest.mark.slow] if slow else [])
    for slow in (False, True)
    for size, layouts in (SLOW if slow else QUICK).items()
    for layout in layouts
    for family in FAMILIES
]


@pytest.mark.parametrize(("world", "layout", "family"), CASES)
def test_a_replayed_update_equals_the_twins(
    world: tuple[int, bool],
    layout: str,
    family: str,
    runs: Runs,
    twins: dict[str, Twin],
    checkpoints: dict[str, Path],
) -> None:
    twin, found = twins[family], [rank[layout, family] for rank in runs[world]]
    surprisal = {place: value for rank in found for place, value in rank["surprisal"].items()}
    assert surprisal.keys() == twin.surprisal.keys()
    for place, value in twin.surprisal.items():
        assert surprisal[place] == pytest.approx(value, abs=2e-5)
    before = load_file(checkpoints[family] / "model.safetensors")
    busiest = (twin.tokens.max(1).values / twin.tokens.mean(1)).max().item()
    known = sum(known for *_, known in SHAPES) / sum(a + b - 1 for a, b, _ in SHAPES)
    for rank in found:
        for name, weight in rank["weights"].items():
            if name.endswith("e_score_correction_bias"):
                assert torch.equal(weight, before[name])
                continue
            gradient = transformers_gradient(twin.gradient, name)
            step = gradient / (gradient.abs() + 1)
            torch.testing.assert_close(
                (before[name] - weight).double(), step, atol=2e-6, rtol=2e-4, msg=name
            )
        for metrics in (rank["load"], rank["metrics"]):
            assert metrics["expert_load_max"] == pytest.approx(busiest)
            assert metrics["expert_load_unused"] == (twin.tokens == 0).double().mean().item()
            assert metrics["expert_balance"] == pytest.approx(twin.balance.mean().item(), rel=1e-5)
            # 2 or 3 of 8 drawn at random
            assert 0.1 < metrics["routing_agreement"] < 0.6
    assert 0.6 < known < 0.8, "some tokens are free"


def test_the_routers_have_gradients(twins: dict[str, Twin]) -> None:
    for twin in twins.values():
        gates = [grad for name, grad in twin.gradient.items() if name.endswith("mlp.gate.weight")]
        assert len(gates) in (2, 3) and all(gate.abs().max() > 1e-3 for gate in gates)


@pytest.fixture
def alone() -> Iterator[None]:
    yield
    topologies.stop()


def moved(actor: Actor) -> None:
    """Other routers, as after updates."""
    dice = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, parameter in actor.chunks[0].named_parameters():
            if name.endswith("router.weight"):
                parameter += 0.2 * torch.randn(parameter.shape, generator=dice)


def choices_of(batch: TokenBatch) -> list[numpy.ndarray]:
    """The scores of every sequence, from packed micro-batches of one rank."""
    found: dict[int, numpy.ndarray] = {}
    for micro in batch.microbatches:
        assert micro.routing_RLK is not None and micro.cumulative_lengths is not None
        ends, numbers = micro.cumulative_lengths.tolist(), batch.sequence_T[micro.rows].tolist()
        for number, (a, b) in zip(dict.fromkeys(numbers), itertools.pairwise(ends), strict=True):
            found[number] = micro.routing_RLK[a:b].numpy()
    return [found[number] for number in sorted(found)]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_later_updates_replay_the_experts_of_the_scoring_pass(
    family: str, checkpoints: dict[str, Path], alone: None
) -> None:
    """Scored under old weights, updated under new ones: the update of a run whose rollouts bring
    the choices of the old ones along; and not that of one that routes freely.
    """
    directory, weights = checkpoints[family], {}
    shape = shape_of(directory)
    groups = made_groups(shape)
    for mode in ("old_policy", "rollout", "none"):
        actor = an_actor(directory, f"policy.routing_replay={mode}", FULL)
        batch = actor.pack(groups, 0)
        if mode == "old_policy":
            assert all(micro.routing_RLK is None for micro in batch.microbatches)
            batch = actor.score(batch)
            known = [shape.encoded(choices) for choices in choices_of(batch)]
            groups = [
                dataclasses.replace(
                    group, rollouts=(dataclasses.replace(group.rollouts[0], routing=routing),)
                )
                for group, routing in zip(groups, known, strict=True)
            ]
        moved(actor)
        if mode != "old_policy":
            batch = actor.score(batch)
        metrics, _ = actor.update(batch, SURPRISAL, signals_of(batch))
        assert ("routing_agreement" in metrics) == (mode != "none")
        assert metrics.get("routing_agreement", 0.0) < 0.95
        weights[mode] = torch.cat([weight.flatten() for _, weight in actor.weights()])
    assert torch.equal(weights["old_policy"], weights["rollout"])
    assert (weights["none"] - weights["rollout"]).abs().max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_ends_with_its_last_reference(
    family: str, checkpoints: dict[str, Path], alone: None
) -> None:
    """Nothing of a micro-batch stays with Megatron's dispatchers: its graph would hold the model,
    and with it the threads of its process groups.
    """
    actor = an_actor(checkpoints[family])
    batch = actor.score(actor.pack(made_groups(shape_of(checkpoints[family])), 0))
    actor.update(batch, SURPRISAL, signals_of(batch))
    model = weakref.ref(actor.chunks[0])
    del actor, batch
    gc.collect()
    assert model() is None


@pytest.mark.parametrize("setting", [REPLAY, BALANCE])
def test_a_model_without_experts_replays_nothing(setting: str, tmp_path: Path, alone: None) -> None:
    directory = write_checkpoint(tmp_path, tiny_config("qwen3"))
    with pytest.raises(UserError, match=f"^{setting} needs experts; qwen3 has none: set it to "):
        an_actor(directory, setting)


def test_choices_of_another_model_are_refused(checkpoints: dict[str, Path], alone: None) -> None:
    (group, *_) = made_groups(shape_of(checkpoints["qwen3_moe"]))
    rollout = dataclasses.replace(group.rollouts[0], routing=numpy.zeros(10, numpy.uint8))
    actor = an_actor(checkpoints["qwen3_moe"], REPLAY)
    with pytest.raises(ValueError, match="10 bytes of expert choices are no multiple of the 9"):
        actor.pack([dataclasses.replace(group, rollouts=(rollout,))], 0)
