"""Families under every layout against transformers' own
implementation, all in float64: the log-prob of every loss token and the gradient of every weight,
as the Actor packs, schedules and reduces them, within 1e-9.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_stare.config import Config, override
from megatron_stare.policy import build
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.huggingface.names import name_table
from megatron_stare.records import BoundLoss, LossTokens, Signals
from tests.distributed import run_distributed
from tests.policy.huggingface.test_families_float64 import (
    OPTIONS,
    Float64,
    exact_angles,
    relative,
)
from tests.policy.test_actor_sequences import rounds_of_groups
from tests.policy.test_model_experts import transformers_gradient
from tests.tiny_models import tiny_config, write_checkpoint

TP, PP, CP, EP, ETP = (
    f"policy.{name}_parallel_size=2"
    for name in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
)
SP, VPP = "policy.sequence_parallel=true", "policy.virtual_pipeline_model_parallel_size=2"
WHOLE = "policy.expert_tensor_parallel_size=1"
PADDED, EACH = "policy.packed_sequences=false", "policy.max_tokens_per_gpu=28"
FULL, SELECTIVE = (f"policy.recompute_granularity={name}" for name in ("full", "selective"))
LAYOUTS: dict[int, dict[str, tuple[str, ...]]] = {
    1: {
        "packed": (),
        "padded": (PADDED,),
        "a sequence each": (EACH,),
        "recompute full": (FULL,),
        "recompute attention": (SELECTIVE,),
        "recompute MLPs": (SELECTIVE, "policy.recompute_modules=mlp"),
        "recompute experts": (SELECTIVE, "policy.recompute_modules=moe"),
    },
    2: {
        "TP2 SP": (TP, SP),
        "TP2 SP padded": (TP, SP, PADDED),
        "TP2 SP whole experts": (TP, SP, WHOLE),
        "TP2 SP EP2 whole experts": (TP, SP, EP, WHOLE),
        "TP2 SP recompute full": (TP, SP, FULL),
        "PP2": (PP, EACH),
        "PP2 VPP2": (PP, VPP, EACH),
        "PP2 VPP2 padded": (PP, VPP, EACH, PADDED),
        "PP2 VPP2 recompute full": (PP, VPP, EACH, FULL),
        "CP2": (CP,),
        "CP2 padded": (CP, PADDED),
        "CP2 recompute attention": (CP, SELECTIVE),
        "EP2": (EP,),
        "CP2 EP2": (CP, EP),
    },
    4: {
        "TP2 SP EP2 ETP2": (TP, SP, EP, ETP),
        "TP2 SP CP2": (TP, SP, CP),
        "TP2 SP PP2": (TP, SP, PP, EACH),
        "PP2 VPP2 EP2": (PP, VPP, EP, EACH),
        "PP2 CP2 recompute full": (PP, CP, EACH, FULL),
    },
}
# Ranks share two cores: these models run under every layout, the others under some.
EVERYWHERE = (
    *("deepseek, every part", "glm, every part", "glm flash"),
    *("delta nets", "delta nets, experts"),
)
CROSSING = ("TP2 SP", "CP2", "PP2 VPP2")
QUICK = ("packed", "TP2 SP EP2 whole experts", "PP2 VPP2", "CP2 padded", "TP2 SP EP2 ETP2")
WITHOUT = {"delta nets": {"EP2", "ETP2", "experts"}, "delta nets, experts": {"MLPs"}}
CASES = [
    (layout, option)
    for layouts in LAYOUTS.values()
    for layout in layouts
    for option in (OPTIONS if layout in CROSSING else EVERYWHERE)
    if not WITHOUT.get(option, set()) & set(layout.split())
]
SHAPE = {"num_hidden_layers": 4}
Result = tuple[dict[int, float], dict[str, Tensor]]


def squares(tokens: LossTokens) -> Tensor:
    """A loss that weighs each token by its own advantage and surprisal."""
    return tokens.advantage * tokens.surprisal.square()


def fields_of(option: str) -> dict[str, Any]:
    """The model has four layers, so that two stages of two chunks hold one each."""
    family, changes = OPTIONS[option]
    more = {"smollm3": {"no_rope_layers": [1, 0, 1, 0]}}.get(family, {})
    return SHAPE | more | changes


def measured(directory: str, options: tuple[str, ...]) -> Result:
    """This rank's log-probs by their tokens' numbers, and the gradient of every weight by its name
    in Hugging Face. Weights, gradient buffers and messages between ranks are in float64.
    """
    from megatron.core.models.common.embeddings import RotaryEmbedding

    gc.collect()  # models of earlier cases, whose process groups have threads
    settings = (f"policy.hf_checkpoint={directory}", "policy.packed_sequences=true")
    budget = "policy.max_tokens_per_gpu=300"
    config = override(Config(), [*settings, budget, "optimizer.clip_grad=1e9", *options])
    topology = topologies.start(config.policy)
    actor = Actor(config, topology, total_steps=1)
    for chunk in actor.chunks:
        assert all(parameter.dtype == torch.float64 for parameter in chunk.parameters())
        chunk.config.moe_router_dtype = "fp64"
    with Float64():
        for module in (module for chunk in actor.chunks for module in chunk.modules()):
            if isinstance(module, RotaryEmbedding):
                exact_angles(module, actor.hf.rope_parameters)
        batch = actor.score(actor.pack(rounds_of_groups(), 0))
        surprisal_T, weight_T = batch.surprisal_T, torch.ones_like(batch.advantage_T)
        assert surprisal_T is not None and surprisal_T.dtype == torch.float64
        signals = Signals({}, coefficient_T=weight_T, weight_T=weight_T, state={})
        actor._gradient(batch, BoundLoss(squares), signals)
    with torch.no_grad():
        for chunk in actor.chunks:
            for parameter in chunk.parameters():
                assert parameter.main_grad.dtype == torch.float64
                parameter.copy_(parameter.main_grad)
    gradients = {name: tensor.clone() for name, tensor in actor.weights()}
    numbers = batch.token_index_T.tolist()
    return dict(zip(numbers, (-surprisal_T).tolist(), strict=True)), gradients


_softmax = torch.softmax


def wide_softmax(*args: Any, **kwargs: Any) -> Tensor:
    """torch.softmax, in float64 where float32 is asked for."""
    if kwargs.get("dtype") is torch.float32:
        kwargs["dtype"] = torch.float64
    return _softmax(*args, **kwargs)


def under_each_layout(
    rank: int, world_size: int, directories: dict[str, str], cases: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], Result]:
    """The results of each case, a layout and an option."""
    from megatron.core import distributed

    build.DTYPES["fp32"] = torch.float64
    # No mode is on in a backward pass, in which layers are computed again.
    Tensor.float = Tensor.double  # type: ignore[method-assign]
    torch.softmax = wide_softmax
    settings = distributed.DistributedDataParallelConfig

    def precise(**given: Any) -> Any:
        return settings(**given | {"grad_reduce_in_fp32": False})

    distributed.DistributedDataParallelConfig = precise  # type: ignore[assignment,misc]
    return {
        (layout, option): measured(directories[option], LAYOUTS[world_size][layout])
        for layout, option in cases
    }


@functools.cache
def of_transformers(directory: str) -> Result:
    """The same of transformers, one sequence at a time."""
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, **eager)
    found: dict[int, float] = {}
    with Float64():
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
        rollouts = [(g, rollout) for g in rounds_of_groups() for rollout in g.rollouts]
        for number, (group, rollout) in enumerate(rollouts):
            prompt = group.prompt.token_ids
            ids = torch.tensor([*prompt.tolist(), *rollout.response_ids.tolist()])
            log_prob_SV = torch.log_softmax(model(ids[None]).logits[0, :-1, :71], -1)
            log_prob_R = log_prob_SV.gather(1, ids[1:, None])[len(prompt) - 1 :, 0]
            chosen = rollout.loss_mask.nonzero()[0].tolist()
            if chosen:
                (rollout.advantage * log_prob_R[chosen].square().sum()).backward()
            found |= {(number << 32) + place: log_prob_R[place].item() for place in chosen}
    return found, {name: parameter.grad for name, parameter in model.named_parameters()}


class Runs(dict[tuple[str, str], list[Result]]):
    """Each layout's and option's results, one per rank; quick ones of a size run together when the
    first of them is asked for, and so do the others.
    """

    def __init__(self, base: Path) -> None:
        super().__init__()
        self.base = base

    def directory(self, option: str) -> str:
        directory = self.base / option.replace(" ", "_")
        if not directory.exists():
            family, _ = OPTIONS[option]
            write_checkpoint(directory, tiny_config(family, **fields_of(option)), seed=3)
        return str(directory)

    def __missing__(self, key: tuple[str, str]) -> list[Result]:
        size = next(size for size, layouts in LAYOUTS.items() if key[0] in layouts)
        chosen = [each for each in CASES if each[0] in LAYOUTS[size]]
        chosen = [each for each in chosen if is_quick(*each) == is_quick(*key)]
        options = {option: self.directory(option) for _, option in chosen}
        ranks = run_distributed(under_each_layout, size, options, chosen, timeout_s=1500)
        self.update({each: [rank[each] for rank in ranks] for each in ranks[0]})
        return self[key]


def is_quick(layout: str, option: str) -> bool:
    return layout in QUICK and option in EVERYWHERE[:2]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("layouts"))


@pytest.mark.parametrize(
    ("layout", "option"),
    [pytest.param(*case, marks=[] if is_quick(*case) else [pytest.mark.slow]) for case in CASES],
)
def test_log_probs_and_gradients_are_those_of_transformers(
    layout: str, option: str, runs: Runs
) -> None:
    log_probs, gradients = of_transformers(runs.directory(option))
    found: dict[int, float] = {}
    for own, theirs in runs[layout, option]:
        found |= own
        for entry in name_table(build.read_hf_config(runs.directory(option))):
            for name in entry.hf if entry.dtype is None else ():  # not the routers' bias
                expected = transformers_gradient(gradients, name)
                assert relative(theirs[name], expected) < 1e-9, name
    assert found.keys() == log_probs.keys()
    ours = torch.tensor([found[number] for number in log_probs], dtype=torch.float64)
    expected = torch.tensor(list(log_probs.values()), dtype=torch.float64)
    assert relative(ours, expected) < 1e-9
