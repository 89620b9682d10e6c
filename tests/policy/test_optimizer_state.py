"""The optimizer's state under every layout: bit for bit the same whole tensors, of which each rank
writes and holds its share alone.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_stare.config import Config, LossConfig, override
from megatron_stare.losses import find_objective
from megatron_stare.policy import model_state, optimizer
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.checkpoints import actor_state
from megatron_stare.policy.checkpoints.actor_state import ShardedBytes
from megatron_stare.policy.checkpoints.checkpoints import Save
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Group, Prompt, Rollout
from tests.distributed import run_distributed
from tests.memory import peak_bytes
from tests.tiny_models import tiny_config, write_checkpoint

VOCABULARY = 71  # which two tensor-parallel ranks pad
TP, PP, EP, CP = (
    f"policy.{name}_parallel_size=2"
    for name in ("tensor_model", "pipeline_model", "expert_model", "context")
)
SHARED_OUT = "policy.use_distributed_optimizer=true"
FIRST = ("policy.use_distributed_optimizer=false",)
DP4 = (SHARED_OUT,)
# From DP4 to the first, from each to the next, and back.
LAYOUTS: dict[str, dict[str, tuple[str, ...]]] = {
    "qwen3_moe": {
        "PP2 EP2": (SHARED_OUT, PP, EP),
    },
    "qwen3_moe_stepped": {
        "TP2 DP2": (SHARED_OUT, TP, "policy.sequence_parallel=true"),
        "EP2, not distributed": ("policy.use_distributed_optimizer=false", EP),
    },
    "qwen2_tied": {"PP2 CP2": (SHARED_OUT, PP, CP), "TP2 PP2": (SHARED_OUT, TP, PP)},
}
DTYPES = {"qwen3_moe": "bf16", "qwen3_moe_stepped": "bf16", "qwen2_tied": "fp32"}
# Few and wide experts: compared with a part of their state, the exchanged metadata is small.
WIDE = {"num_hidden_layers": 2, "num_experts": 4, "moe_intermediate_size": 1600}
SHAPES: dict[str, dict[str, int]] = {"qwen3_moe": WIDE, "qwen3_moe_stepped": WIDE, "qwen2_tied": {}}


@pytest.mark.parametrize("shape", [(7,), (3, 4), (1, 5), (2, 3, 4), (3, 1, 2, 2)])
def test_boxes_hold_every_range_in_order(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(math.prod(shape)).view(shape)
    for start, stop in itertools.combinations_with_replacement(range(math.prod(shape) + 1), 2):
        found = list(optimizer.boxes(shape, start, stop))
        held = [
            numbers[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))].flatten()
            for offset, size in found
        ]
        assert len(found) <= 2 * len(shape) - 1
        assert torch.cat([torch.empty(0, dtype=torch.long), *held]).tolist() == [
            *range(start, stop)
        ]


def actor_of(model: Path, dtype: str, options: tuple[str, ...]) -> Actor:
    fields = (f"policy.hf_checkpoint={model}", f"policy.dtype={dtype}", "optimizer.lr=1e-2")
    config = override(Config(), [*fields, "policy.max_tokens_per_gpu=64", *options])
    return Actor(config, topologies.start(config.policy), total_steps=10)


def update(actor: Actor) -> None:
    """One step of cross-entropy on random tokens."""
    dice = torch.Generator().manual_seed(int(actor.scheduler.num_steps))
    groups = []
    for number in range(8):
        ids = tuple(torch.randint(1, VOCABULARY, (12,), generator=dice).tolist())
        rollout = Rollout(
            ids[4:], (0.0,) * 8, (1,) * 8, status="completed", weight_version=0, advantage=0.0
        )
        groups.append(Group(Prompt(number, ids[:4], ""), (rollout,)))
    objective, config = find_objective("sft"), LossConfig(name="sft")
    batch = actor.pack(groups, 0)
    signals = objective.plan(batch, config, actor.topology.across, {})
    metrics, _ = actor.update(batch, objective.bind(config), signals)
    assert metrics["grad_norm"] > 0


def whole(actor: Actor) -> dict[str, Tensor]:
    """Every tensor of weights and optimizer state, put together from all ranks."""
    weights = model_state.sharded_weights(actor.chunks, actor.topology)
    pieces = optimizer.state_pieces(actor.optimizer, weights)
    own = [
        (piece.key, piece.global_shape, piece.global_offset, piece.data.clone())
        for piece in pieces.values()
    ]
    found: dict[str, Tensor] = {}
    for part in actor.topology.gather(own):
        for key, shape, offset, data in part:
            target = found.setdefault(key, torch.full(shape, torch.nan))
            target[tuple(slice(a, a + n) for a, n in zip(offset, data.shape, strict=True))] = data
    found = {key: tensor[:VOCABULARY] if "word_emb" in key or "output_layer" in key else tensor
             for key, tensor in found.items()}  # fmt: skip
    for part in actor.optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            assert state["step"].item() == actor.scheduler.num_steps
    return found | {name: tensor.clone() for name, tensor in actor.weights()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Equal bit for bit; no element of a whole tensor left out."""
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) and found[name].isfinite().all() for name in found
    )


def loop_state(topology: Topology) -> dict[str, Any]:
    """Bytes that all ranks but the second hold parts of, in their order; and what rank 0 has."""
    lengths = [0 if rank == 1 else 5 + rank for rank in range(topology.world_size)]
    begin = sum(lengths[: topology.rank])
    part = torch.arange(begin, begin + lengths[topology.rank], dtype=torch.uint8)
    spread = ShardedBytes(part, begin, sum(lengths))
    return {"collector": {"surplus": spread, "pending": [1]}, "size": sum(lengths)}


def is_whole(state: dict[str, Any]) -> bool:
    """Whether every rank has read all that `loop_state` spread."""
    expected = torch.arange(state["size"], dtype=torch.uint8)
    collector = state["collector"]
    return torch.equal(collector["surplus"], expected) and collector["pending"] == [1]


def save(
    actor: Actor, directory: Path, background: bool = False, loop: dict[str, Any] | None = None
) -> Save:
    """The work of Checkpoints, without its names."""
    if actor.topology.is_first:
        directory.mkdir()
    actor.topology.gather(None)
    loop = loop_state(actor.topology) if loop is None else loop
    content = actor_state.of_actor(actor, loop)
    saving = Save(content, directory, actor.topology, background)
    saving.finish()
    return saving


def bytes_written(saving: Save) -> int:
    """Tensor bytes that this rank wrote."""
    return sum(
        item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
        for item in saving.writer.plan.items
        if item.tensor_data is not None
    )


def share(actor: Actor, directory: Path, background: bool) -> tuple[int, int]:
    """The bytes that a rank writes, and the memory that saving takes [bytes]."""
    written: list[int] = []
    peak = peak_bytes(lambda: written.append(bytes_written(save(actor, directory, background, {}))))
    return written[0], peak


def story(rank: int, world_size: int, base: Path, family: str) -> dict[str, Any]:
    """Four ranks load one rank's checkpoint, train, and pass it from layout to layout."""
    model, dtype = base / "model", DTYPES[family]
    actor = actor_of(model, dtype, DP4)
    state = actor_state.into_actor(actor, base / "one rank")
    alike = same(whole(actor), torch.load(base / "one rank.pt"))
    found: dict[str, Any] = {"one rank": alike and is_whole(state)}
    update(actor)
    expected = whole(actor)
    save(actor, base / "DP4")
    if rank == 0:
        torch.save(expected, base / "DP4.pt")
    found["whole"] = sum(tensor.nbytes for tensor in expected.values())
    found["shares"] = [share(actor, base / f"share {way}", way) for way in (False, True)]
    update(actor)
    next_step = whole(actor)
    source = "DP4"
    for layout, options in (LAYOUTS[family] | {"DP4 again": DP4}).items():
        actor = actor_of(model, dtype, options)
        state = actor_state.into_actor(actor, base / source)
        found[f"{source} -> {layout}"] = same(whole(actor), expected) and is_whole(state)
        save(actor, base / layout)
        source = layout
    update(actor)
    found["one step on"] = same(whole(actor), next_step)
    return found


@pytest.fixture(
    scope="module",
    params=[
        "qwen3_moe",
        pytest.param("qwen3_moe_stepped", marks=pytest.mark.slow),
        pytest.param("qwen2_tied", marks=pytest.mark.slow),
    ],
)
def outcome(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, list[dict[str, Any]]]:
    base, family = tmp_path_factory.mktemp("story"), request.param
    write_checkpoint(base / "model", tiny_config(family, **SHAPES[family]))
    actor = actor_of(base / "model", DTYPES[family], FIRST)
    for _ in range(2):
        update(actor)
    save(actor, base / "one rank")
    torch.save(whole(actor), base / "one rank.pt")
    topologies.stop()
    return family, base, run_distributed(story, 4, base, family)


def test_every_layout_loads_the_same_state(outcome: Any) -> None:
    family, _, ranks = outcome
    for found in ranks:
        results = {name: value for name, value in found.items() if name not in ("whole", "shares")}
        assert len(results) == 3 + len(LAYOUTS[family])
        assert [name for name, value in results.items() if not value] == []


def test_one_rank_loads_the_state_of_four(outcome: Any) -> None:
    family, base, _ = outcome
    actor = actor_of(base / "model", DTYPES[family], FIRST)
    assert is_whole(actor_state.into_actor(actor, base / "DP4"))
    found, expected = whole(actor), torch.load(base / "DP4.pt")
    topologies.stop()
    assert same(found, expected)


@pytest.mark.parametrize("background", [False, True])
def test_each_of_four_ranks_writes_a_quarter_and_holds_no_more(
    background: bool, outcome: Any
) -> None:
    family, _, ranks = outcome
    found = [rank["shares"][background] for rank in ranks]
    quarter = ranks[0]["whole"] / 4
    assert sum(written for written, _ in found) == 4 * quarter
    for written, peak in found:
        assert written == pytest.approx(quarter, rel=0.05)
        assert family != "qwen3_moe" or peak < 1.25 * quarter
