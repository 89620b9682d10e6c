"""Random settings under random layouts of two ranks against one rank: combinations that no other
test names. A failure prints the settings of the case. The variable RANDOM_SEED chooses others.
"""

from __future__ import annotations

import math
import os
import random
from pathlib import Path
from typing import Any

import pytest

from megatron_stare.config import UserError
from megatron_stare.loop.trainer import Trainer
from megatron_stare.losses.registry import all_objectives
from megatron_stare.numerics.advantages import ESTIMATORS
from megatron_stare.policy import topology as topologies
from tests.distributed import run_distributed
from tests.loop.test_trainer_layouts import CP, EP, PP, SP, SPREAD, TP, VPP, WHOLE_EXPERTS
from tests.small_run import small_config
from tests.tiny_models import byte_tokenizer, tiny_config, write_checkpoint

pytestmark = pytest.mark.slow
FIRST = int(os.environ.get("RANDOM_SEED", "0"))
SEEDS = range(FIRST, FIRST + 8)
CASES = 4  # of each seed
FAMILIES = ("qwen2_tied", "qwen3", "llama", "qwen3_moe", "glm4_moe", "deepseek_v3")
WITH_EXPERTS = ("qwen3_moe", "glm4_moe", "deepseek_v3")
REFERENCE = "policy.ref_hf_checkpoint={directory}/{family} reference"
# One row is drawn from each table; an empty row leaves the defaults. A draw that is refused, as a
# contradiction or for settings that an objective needs, is replaced by another one.
TABLES: tuple[tuple[tuple[str, ...], ...], ...] = (
    (
        ("loss.aggregation=seq-mean-token-mean",),
        ("loss.aggregation=row-mean",),
        *[()] * 2,
    ),
    (
        (REFERENCE, "loss.kl_loss_coef=0.1", "loss.kl_loss_type=k1"),
        (REFERENCE, "loss.kl_loss_coef=0.1"),
        (REFERENCE, "loss.distillation_coef=0.5", "rollout.dynamic_sampling=false"),
        (REFERENCE, "loss.distillation_coef=0.5", "loss.distillation_top_k=8"),
        *[()] * 6,
    ),
    (
        ("mismatch.correction=token_tis", "mismatch.upper=1.05"),
        ("mismatch.correction=geo_rs", "mismatch.upper=1.05"),
        ("mismatch.correction=sequence_mis", "mismatch.upper=1.05", "mismatch.rejected=drop"),
        ("mismatch.old_policy=rollout",),
        *[()] * 4,
    ),
    (
        ("adapters.rank=2", "adapters.alpha=8"),
        ("adapters.rank=2", "adapters.targets=q,o,down", "adapters.experts=shared"),
        *[()] * 4,
    ),
    (
        ("train.num_steps_per_rollout=2",),
        ("train.num_steps_per_rollout=2", "train.epochs=2"),
        ("train.epochs=2", "train.replan=false"),
        *[()] * 3,
    ),
    (
        ("policy.packed_sequences=false",),
        ("policy.packed_sequences=true",),
        ("policy.packed_sequences=true", "policy.shared_prompts=true"),
    ),
    (("policy.head=recompute",), ("policy.head=logits",), *[()] * 2),
    (
        ("policy.recompute_granularity=full",),
        ("policy.recompute_granularity=selective",),
        *[()] * 3,
    ),
    (("policy.max_tokens_per_gpu=28",), ("policy.max_tokens_per_gpu=2000",), *[()] * 2),
    (("policy.routing_replay=rollout",), ("policy.routing_replay=old_policy",), *[()] * 2),
    (
        *((f"scoring.advantage={name}",) for name in ESTIMATORS if name != "qae"),
        *[()] * len(ESTIMATORS),
    ),
    (("scoring.shaping=signed",), ("scoring.overlong_buffer_len=4",), *[()] * 4),
    (("rollout.asynchrony=one_step_off",), ("rollout.dynamic_sampling=false",), *[()] * 3),
    (("rollout.rollout_temperature=0.7",), ("optimizer.clip_grad=0.05",), *[()] * 3),
)
OBJECTIVES = (*all_objectives(), *["stare"] * 15)
LAYOUTS = ((), (SPREAD,), (TP, SP), (PP,), (PP, VPP), (CP,))
EXPERT_LAYOUTS = (*LAYOUTS, (EP,), (CP, EP), (TP, SP, WHOLE_EXPERTS), (TP, SP, EP, WHOLE_EXPERTS))


def drawn(dice: random.Random) -> tuple[str, list[str], list[str]]:
    """A family, settings and a layout."""
    family = dice.choice(FAMILIES)
    settings = [f"loss.name={dice.choice(OBJECTIVES)}", "optimizer.adam_eps=1e-3"]
    settings += [setting for table in TABLES for setting in dice.choice(table)]
    layout = dice.choice(EXPERT_LAYOUTS if family in WITH_EXPERTS else LAYOUTS)
    return family, settings, list(layout)


def trained(directory: str, name: str, family: str, settings: list[str]) -> dict[str, Any]:
    """The metrics of two steps, and the weights after them."""
    filled = [each.format(directory=directory, family=family) for each in settings]
    paths = (f"policy.hf_checkpoint={directory}/{family}", f"run.dir={directory}/{name}")
    config = small_config(Path(directory), *filled, *paths)
    trainer = Trainer(config, topologies.start(config.policy))
    trainer.engine.load_weights(trainer.actor.weights(), 0)
    metrics = [trainer.train_step() for _ in range(2)]
    weights = {key: tensor.to("cpu", copy=True) for key, tensor in trainer.actor.weights()}
    return {"metrics": metrics, "weights": weights}


def on_one_rank(rank: int, world_size: int, directory: str, seed: int) -> list[Any]:
    """[case, its result], of the first cases of the seed that are possible."""
    dice, found = random.Random(seed), list[Any]()
    while len(found) < CASES:
        family, settings, _ = case = drawn(dice)
        try:
            found.append((case, trained(directory, f"one {seed} {len(found)}", family, settings)))
        except UserError:
            continue
    return found


def on_two_ranks(rank: int, world_size: int, directory: str, seed: int, cases: Any) -> list[Any]:
    """The results of the cases under their layouts; a refusal's text instead."""
    found = list[Any]()
    for number, (family, settings, layout) in enumerate(cases):
        try:
            run = f"two {seed} {number}"
            found.append(trained(directory, run, family, settings + layout))
        except UserError as error:
            found.append(str(error))
    return found


def differences(one: dict[str, Any], two: dict[str, Any]) -> list[str]:
    """Every metric and weight that differs by more than rounding; seconds are left out."""
    found = []
    for step, (ours, theirs) in enumerate(zip(two["metrics"], one["metrics"], strict=True), 1):
        for key in sorted(key for key in ours.keys() | theirs.keys() if "seconds" not in key):
            pair = ours.get(key, math.inf), theirs.get(key, -math.inf)
            if not math.isclose(*pair, rel_tol=2e-3, abs_tol=2e-5):
                found.append(f"step {step}: {key} = {ours.get(key)}, on one rank {theirs.get(key)}")
    for name, tensor in one["weights"].items():
        if (tensor - two["weights"][name]).abs().max() > 1e-4:
            found.append(f"weights of {name}")
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("random")
    small_config(path)
    shape = {"vocab_size": 257, "eos_token_id": 0, "max_position_embeddings": 64}
    for family in FAMILIES:
        for seed, name in ((5, family), (6, f"{family} reference")):
            config = tiny_config(family, **shape, num_hidden_layers=4)
            write_checkpoint(path / name, config, seed=seed)
            byte_tokenizer().save_pretrained(path / name)
    return str(path)


@pytest.mark.parametrize("seed", SEEDS)
def test_two_ranks_train_as_one(seed: int, directory: str) -> None:
    (alone,) = run_distributed(on_one_rank, 1, directory, seed, timeout_s=400)
    cases = [case for case, _ in alone]
    ranks = run_distributed(on_two_ranks, 2, directory, seed, cases, timeout_s=400)
    refused = [result for result in ranks[0] if isinstance(result, str)]
    assert len(refused) < CASES, refused
    for (case, one), *both in zip(alone, *ranks, strict=True):
        for two in both:
            assert isinstance(two, str) or not differences(one, two), (case, differences(one, two))
