"""Plans of runs with adapters: the parameters that the real model trains, and their work."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from megatron_stare.config import Config, override
from megatron_stare.planning.machine import H100
from megatron_stare.planning.memory import rank_memory
from megatron_stare.planning.shapes import sizes, stage_counts, trained_counts
from megatron_stare.planning.work import Tokens, training
from megatron_stare.policy.huggingface.shape import shape_of
from tests.distributed import run_distributed
from tests.policy.test_optimizer_state import actor_of
from tests.tiny_models import tiny_config, write_checkpoint

LAYOUTS = (("policy.tensor_model_parallel_size=2",), ("policy.pipeline_model_parallel_size=2",), ())
TARGETS = ("q,k,v,o,gate,up,down", "k,o", "down")
CASES = tuple(itertools.product(LAYOUTS, TARGETS))
TENSOR = (*LAYOUTS[0], "policy.sequence_parallel=true")
LATENT = tuple(itertools.product((TENSOR, LAYOUTS[1]), ("q,k,v,o", "k,v")))
WHOLE = (*TENSOR, "policy.expert_tensor_parallel_size=1")
SPLIT = (*WHOLE, "policy.expert_model_parallel_size=2")
KINDS = ("each", "shared", "none")
EXPERTS = tuple((layout, "q,up", kind) for layout in (WHOLE, SPLIT, LAYOUTS[1]) for kind in KINDS)


def options(layout: tuple[str, ...], targets: str, experts: str = "each") -> tuple[str, ...]:
    chosen = (f"adapters.targets={targets}", f"adapters.experts={experts}")
    return ("adapters.rank=3", *chosen, *layout)


def trained(
    rank: int, world: int, folder: str, cases: tuple[Any, ...] = CASES
) -> list[tuple[int, int]]:
    """(stage, parameters that this rank trains), by layout and targets."""
    found = []
    for layout, targets, *kind in cases:
        actor = actor_of(Path(folder) / "model", "fp32", options(layout, targets, *kind))
        parameters = (each for chunk in actor.chunks for each in chunk.parameters())
        count = sum(each.numel() for each in parameters if each.requires_grad)
        found.append((actor.topology.pipeline_rank, count))
    return found


@pytest.mark.parametrize(
    ("family", "cases"), [("qwen3", CASES), ("deepseek_v3", LATENT), ("glm4_moe", EXPERTS)]
)
def test_planned_trained_parameters_equal_the_real_models(
    family: str, cases: tuple[Any, ...], tmp_path: Path
) -> None:
    hf = tiny_config(family, num_hidden_layers=4)
    write_checkpoint(tmp_path / "model", hf)
    for found in run_distributed(trained, 2, str(tmp_path), cases):
        for (stage, count), case in zip(found, cases, strict=True):
            config = override(Config(), list(options(*case)))
            one = stage_counts(hf, config.policy, 2)[stage]
            planned = trained_counts(one, config.adapters, sizes(config.policy, 2))
            assert planned.parameters == count > 0, case


def test_frozen_weights_have_no_gradient_no_moments_and_two_products() -> None:
    hf = tiny_config("qwen3", num_hidden_layers=4)
    shape, tokens = shape_of(hf), Tokens(sequences=64, prompt=16.0, response=48.0)
    plans = {}
    for rank in (0, 2):
        config = override(Config(), ["policy.dtype=bf16", f"adapters.rank={rank}"])
        group, counts = sizes(config.policy, 1), tuple(stage_counts(hf, config.policy, 1))
        plans[rank] = (
            rank_memory(counts[0], shape, config, group, H100),
            training(config, shape, counts, group, tokens, H100),
            trained_counts(counts[0], config.adapters, group).parameters,
        )
    (whole, work, _), (memory, less, added) = plans[0], plans[2]
    assert memory.parameters == whole.parameters + 2 * added
    assert (memory.gradients, memory.optimizer) == (4 * added, 12 * added)
    assert (memory.activations, memory.head) == (whole.activations, whole.head)
    matrices = 2 * tokens.total * shape.active_matrices + 2 * 64 * 48.0 * shape.head
    assert work.model_operations - less.model_operations == pytest.approx(
        matrices - 4 * 2 * tokens.total * added
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_uses_only_the_adapters_of_its_experts(kind: str) -> None:
    """Three products a pass of the widths of gate, up and down, for as many experts as it has."""
    hf = tiny_config("glm4_moe")
    shape, tokens = shape_of(hf), Tokens(sequences=64, prompt=16.0, response=48.0)
    assert shape.experts_per_token > 1
    work = {}
    for experts in (kind, "none"):
        chosen = ["policy.dtype=bf16", *options((), "q,gate,up,down", experts)]
        config = override(Config(), chosen)
        counts = tuple(stage_counts(hf, config.policy, 1))
        group = sizes(config.policy, 1)
        work[experts] = training(config, shape, counts, group, tokens, H100).model_operations
    width = 3 * (shape.hidden + shape.expert_width)
    each = width * shape.experts_per_token * shape.sparse_layers * (kind != "none")
    assert work[kind] - work["none"] == pytest.approx(4 * 2 * tokens.total * 3 * each)
