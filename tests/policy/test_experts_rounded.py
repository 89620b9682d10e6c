"""Quantisation-aware training of experts: what the model holds, its log-probs and its gradients
against transformers in float64 on rounded weights, under expert and tensor parallelism.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_stare.__main__ import main
from megatron_stare.collect.rounds import scatter_groups
from megatron_stare.config import Config, UserError, override
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.build import read_hf_config
from megatron_stare.policy.checkpoints import actor_state
from megatron_stare.policy.huggingface.fp8_weights import RoundedWeights, block_matrices
from megatron_stare.policy.huggingface.names import name_table, to_shard
from megatron_stare.policy.huggingface.weights import named_parameters
from megatron_stare.policy.optimizer import mains
from megatron_stare.policy.quantization import load_exported
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Group, Prompt, Rollout, RoutingShape, Signals
from tests.distributed import run_distributed
from tests.policy.reference_experts import ForcedExperts
from tests.policy.test_experts import EP, SP, SURPRISAL, TP, shape_of
from tests.policy.test_model_experts import transformers_gradient
from tests.reference import e4m3_blocks
from tests.small_run import rows_of, small_config
from tests.tiny_models import tiny_config, write_checkpoint

ROUNDED = (
    "policy.weight_quantization=fp8_experts",
    "policy.dtype=bf16",
    "policy.routing_replay=rollout",
)
LAYOUTS = {
    "EP2": (EP,),
    "EP2 distributed optimizer": (EP, "policy.use_distributed_optimizer=true"),
    "TP2 SP, split experts": (TP, SP),
}
LENGTHS = ((4, 30), (9, 21), (3, 25), (6, 40))
TOKENS = sum(response for _, response in LENGTHS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer with experts, whose blocks are ragged on one side and whole on the other."""
    shape = {"num_hidden_layers": 2, "hidden_size": 160, "moe_intermediate_size": 256}
    directory = tmp_path_factory.mktemp("rounded") / "model"
    return write_checkpoint(directory, tiny_config("qwen3_moe", num_experts=4, **shape), 5)


def groups_of(shape: RoutingShape) -> list[Group]:
    """One rollout each; ids and experts drawn at random."""
    dice = numpy.random.default_rng(3)
    groups = []
    for number, (prompt, response) in enumerate(LENGTHS):
        ids = dice.integers(1, 71, prompt + response)
        each = numpy.arange(shape.experts)
        orders = numpy.tile(each, (prompt + response - 1, len(shape.layers), 1))
        chosen = dice.permuted(orders, axis=-1)[..., : shape.top_k]
        rollout = Rollout(
            ids[prompt:],
            numpy.full(response, -4.0, numpy.float32),
            numpy.ones(response, numpy.bool_),
            status="completed",
            weight_version=0,
            advantage=1.0 - number / 2,
            routing=shape.encoded(chosen),
        )
        groups.append(Group(Prompt(number, ids[:prompt], ""), (rollout,)))
    return groups


def an_actor(directory: Path, *options: str) -> Actor:
    """Adam's first step with an epsilon of 1 is g / (|g| + 1)."""
    common = ("policy.max_tokens_per_gpu=200", "optimizer.lr=1", "optimizer.adam_eps=1")
    common += ("optimizer.clip_grad=1e6", "optimizer.weight_decay=0")
    config = override(Config(), [f"policy.hf_checkpoint={directory}", *common, *options])
    return Actor(config, topologies.start(config.policy), total_steps=10)


def held(actor: Actor) -> dict[str, Tensor]:
    """Whole weights by their Hugging Face names."""
    return {name: tensor.detach().clone() for name, tensor in actor.weights()}


def masters(actor: Actor) -> dict[str, tuple[int, Tensor]]:
    """First element and fp32 copy of what this rank's optimizer has of its experts."""
    names = {id(parameter): name for name, parameter in named_parameters(actor.chunks).items()}
    return {
        names[id(parameter)]: (start, main.detach().clone())
        for part in actor.optimizer.chained_optimizers
        for parameter, start, main in mains(part)
        if ".local_experts." in names[id(parameter)]
    }


def one_update(actor: Actor, directory: Path) -> dict[int, float]:
    """The surprisal of this rank's tokens before it."""
    groups = scatter_groups(groups_of(shape_of(directory)), actor.topology)
    batch = actor.score(actor.pack(groups, 0))
    assert batch.surprisal_T is not None
    one_T = torch.ones_like(batch.surprisal_T)
    actor.update(batch, SURPRISAL, Signals(coefficient_T=one_T / TOKENS, weight_T=one_T, state={}))
    return dict(zip(batch.token_index_T.tolist(), batch.surprisal_T.tolist(), strict=True))


def update(directory: Path, *options: str) -> dict[str, Any]:
    """One update; the weights of this rank before and after it."""
    actor = an_actor(directory, *ROUNDED, *options)
    found: dict[str, Any] = {"before": held(actor), "master": masters(actor)}
    surprisal = one_update(actor, directory)
    tensor = actor.topology.expert_tensor
    return found | {
        "surprisal": surprisal,
        "after": held(actor),
        "moved": masters(actor),
        "place": (dist.get_world_size(tensor), dist.get_rank(tensor)),
    }


def under_each_layout(rank: int, size: int, directory: str) -> dict[str, Any]:
    return {name: update(Path(directory), *options) for name, options in LAYOUTS.items()}


@pytest.fixture(scope="module")
def ranks(checkpoint: Path) -> list[dict[str, Any]]:
    return run_distributed(under_each_layout, 2, str(checkpoint))


@pytest.fixture(scope="module")
def rounded(checkpoint: Path) -> dict[str, Tensor]:
    """The first weights of the model, in float64."""
    stored = load_file(checkpoint / "model.safetensors")
    experts = block_matrices(hf_of(checkpoint), experts_only=True)
    assert len(experts) == 3 * 4
    return {
        name: e4m3_blocks(tensor.bfloat16()) if name in experts else tensor.bfloat16().double()
        for name, tensor in stored.items()
    }


class Twin:
    """The same in float64, of these weights: surprisals, and the loss's gradient."""

    def __init__(self, checkpoint: Path, weights: dict[str, Tensor]) -> None:
        forced, shape = ForcedExperts(checkpoint), shape_of(checkpoint)
        with torch.no_grad():
            for name, parameter in forced.model.named_parameters():
                parameter.copy_(fused(name, parameter, weights))
        self.surprisal, total = dict[int, float](), torch.zeros(()).double()
        for scored in forced.scored(groups_of(shape), shape):
            self.surprisal |= scored.surprisal
            total = total - scored.gain / TOKENS
        total.backward()
        self.gradient = {name: p.grad for name, p in forced.model.named_parameters()}


def fused(name: str, parameter: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """A parameter of transformers', which holds a layer's experts in one tensor."""
    if name in weights:
        return weights[name]
    layer, _, part = name.rpartition(".")
    names = {"down_proj": ("down_proj",), "gate_up_proj": ("gate_proj", "up_proj")}[part]
    return torch.stack(
        [
            torch.cat([weights[f"{layer}.{expert}.{one}.weight"] for one in names])
            for expert in range(len(parameter))
        ]
    )


@pytest.fixture(scope="module")
def twins(checkpoint: Path, rounded: dict[str, Tensor]) -> tuple[Twin, Twin]:
    """Twins with rounded experts, and with those of the checkpoint."""
    stored = load_file(checkpoint / "model.safetensors")
    plain = {name: tensor.bfloat16().double() for name, tensor in stored.items()}
    return Twin(checkpoint, rounded), Twin(checkpoint, plain)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_experts_are_rounded(
    layout: str, ranks: list[dict[str, Any]], rounded: dict[str, Tensor]
) -> None:
    for rank in ranks:
        before, after = rank[layout]["before"], rank[layout]["after"]
        assert before.keys() == after.keys() == rounded.keys()
        for name, tensor in before.items():
            assert torch.equal(tensor.double(), rounded[name]), name
            if ".experts." in name:
                assert torch.equal(after[name].double(), e4m3_blocks(after[name])), name
                assert not torch.equal(after[name], tensor)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_are_those_of_the_rounded_model(
    layout: str, ranks: list[dict[str, Any]], twins: tuple[Twin, Twin]
) -> None:
    """In bf16, so within its rounding; it is several times as far from the model as stored."""
    found = {place: s for rank in ranks for place, s in rank[layout]["surprisal"].items()}
    apart = [
        numpy.mean([abs(found[place] - s) for place, s in twin.surprisal.items()]) for twin in twins
    ]
    assert found.keys() == twins[0].surprisal.keys()
    assert apart[0] < 0.1 and apart[0] < apart[1] / 2, apart


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_by_rounded_weights_moves_the_fp32_copies(
    layout: str, ranks: list[dict[str, Any]], twins: tuple[Twin, Twin], checkpoint: Path
) -> None:
    """From the weights that the checkpoint has: what rounding takes is kept."""
    stored, hf = load_file(checkpoint / "model.safetensors"), hf_of(checkpoint)
    entries = {entry.megatron: entry for entry in name_table(hf)}
    seen, error, size = 0, numpy.zeros(2), 0.0
    for rank in ranks:
        found = rank[layout]
        for name, (start, copy) in found["master"].items():
            entry = entries[name]
            first = [stored[each].bfloat16().float() for each in entry.hf]
            steps = [
                [
                    g / (g.abs() + 1)
                    for g in (transformers_gradient(t.gradient, n) for n in entry.hf)
                ]
                for t in twins
            ]
            shard, *moves = (
                to_shard(entry, parts, *found["place"]).flatten()[start:][: copy.numel()]
                for parts in (first, *steps)
            )
            assert torch.equal(copy.flatten(), shard), name
            moved = (copy - found["moved"][name][1]).flatten().double()
            error += [((moved - move) ** 2).sum().item() for move in moves]
            size += (moves[0] ** 2).sum().item()
            seen += copy.numel()
    assert seen >= 4 * 3 * 160 * 256
    relative = numpy.sqrt(error / size)
    assert relative[0] < 0.03 and relative[0] < relative[1] / 2, relative


def hf_of(directory: Path) -> Any:
    return read_hf_config(str(directory))


def a_run(directory: Path, name: str, *settings: str) -> Config:
    """A run of a model with experts in three of four layers."""
    small = (
        "policy.weight_quantization=fp8_experts",
        "policy.dtype=bf16",
        "optimizer.lr_decay_iters=4",
    )
    small += ("run.save_interval=2", "train.num_rollout=4", f"run.dir={directory / name}")
    config = small_config(directory, *small, *settings)
    shape = {"vocab_size": 257, "max_position_embeddings": 64, "moe_intermediate_size": 24}
    write_checkpoint(directory / "model", tiny_config("qwen3_moe", **shape))
    file = directory / "model/model.safetensors"
    weights = {  # else gate and up could have one scale without a visible error
        name: tensor / 256 if name.endswith("up_proj.weight") else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(weights, file, metadata={"format": "pt"})
    return config


def test_a_resumed_run_has_its_fp32_copies(tmp_path: Path, topology: Topology) -> None:
    """Stopped and resumed it is the uninterrupted one."""
    whole, parts = (a_run(tmp_path, name) for name in ("whole", "parts"))
    assert Trainer(whole, topology).run(Interrupt())
    assert Trainer(override(parts, ["train.num_rollout=2"]), topology).run(Interrupt())
    assert Trainer(parts, topology).run(Interrupt())
    assert rows_of(parts) == rows_of(whole)


def test_an_fp8_checkpoint_holds_the_trained_weights(tmp_path: Path) -> None:
    """Bit for bit: trained, exported, quantised, and read back."""
    config, exported, served = a_run(tmp_path, "run"), tmp_path / "exported", tmp_path / "fp8"
    with topologies.session(config.policy) as topology:
        trainer = Trainer(config, topology)
        assert trainer.run(Interrupt())
        weights = held(trainer.actor)
    assert main(["convert", "megatron-to-hf", config.run.dir, str(exported)]) == 0
    words = ["quantize", str(exported), str(served), "--format", "fp8_experts"]
    assert main([*words, "--calibration", config.data.prompt_data]) == 0
    codes = load_file(next(served.glob("*.safetensors")))
    assert codes["model.layers.1.mlp.experts.0.up_proj.weight"].dtype == torch.float8_e4m3fn
    for name, parameter in load_exported(served).named_parameters():
        assert torch.equal(parameter, fused(name, parameter, weights)), name


def test_a_checkpoint_of_a_run_that_did_not_round_is_rounded(
    tmp_path: Path, topology: Topology
) -> None:
    """Gate and up each in blocks of their own."""
    plain = a_run(tmp_path, "plain", "policy.weight_quantization=none", "train.num_rollout=2")
    trainer = Trainer(plain, topology)
    assert trainer.run(Interrupt())
    before = held(trainer.actor)
    actor = Actor(a_run(tmp_path, "rounded"), topology, total_steps=4)
    actor_state.into_actor(actor, Path(plain.run.dir) / "checkpoints/step_00000002")
    for name, tensor in actor.weights():
        expected = e4m3_blocks(before[name]) if ".experts." in name else before[name].double()
        assert torch.equal(tensor.double(), expected), name


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("qwen3", (), "needs experts; qwen3 has none"),
        ("qwen3_moe", (), r"splits model.*gate_proj.weight \[20, 32\] inside them; set it to 1"),
        ("qwen3_moe", ("policy.dtype=fp32",), "needs policy.dtype=bf16"),
    ],
)
def test_a_model_that_cannot_be_rounded_is_refused_with_the_reason(
    family: str, settings: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    directory = write_checkpoint(tmp_path / "model", tiny_config(family))
    options = (f"policy.hf_checkpoint={directory}", *ROUNDED[:2], *settings)
    with pytest.raises(UserError, match=words):
        rounded_on_paper([*options, *(() if family == "qwen3" else (TP, SP))])


def rounded_on_paper(options: list[str]) -> None:
    config = override(Config(), options)
    RoundedWeights([], hf_of(Path(config.policy.hf_checkpoint)), config.policy)
