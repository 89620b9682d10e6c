"""Proof that Megatron's model and transformers' are the same.

Of two checkpoints, one Hugging Face and one Megatron, tensors and logits are compared. Of two
models in memory the first operation is found that they do not compute alike. One table says what is
compared, in the order in which a forward pass computes it: the name, where transformers has it and
where Megatron does. Both models run once over the same ids with the same weights, and every
operation's result is brought to [P, features]. Only the first difference shows where a fault is:
all later operations are computed from it. One process holds both models whole.

Shape legend: P positions, B = 1 sequence, H hidden size.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from megatron_stare.config import PolicyConfig
from megatron_stare.policy import build, model_state
from megatron_stare.policy.conversion import megatron_files
from megatron_stare.policy.huggingface.checkpoint import Checkpoint
from megatron_stare.policy.huggingface.families import megatron_fields, sparse_layers
from megatron_stare.policy.huggingface.names import (
    ParameterMapping,
    attention_rows,
    from_shards,
    is_delta_net,
    name_table,
)
from megatron_stare.policy.topology import Topology

# Of the largest value of a result: what other orders of summation leave, layer after layer.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.05}
# Name of an operation, path of its module, the place of the input that is its result (None: the
# output is), and the function that brings it to [P, features].
Watched = tuple[str, str, int | None, Callable[[Any], Tensor]]
# transformers turns queries and keys in no module: its keys are read from its cache.
_CACHE = "past_key_values."


class LogitDifference(NamedTuple):
    """Over all positions: their number, the largest |difference|, the largest |logit| (NaN where a
    logit is), how often the argmax agrees.
    """

    positions: int
    difference: float
    scale: float
    agreement: float

    @property
    def close(self) -> bool:
        """Whether rounding explains the difference."""
        return self.difference <= TOLERANCES[torch.float32] * max(1.0, self.scale)


def compare_tensors(
    hf_directory: Path, megatron: Path, topology: Topology, lossy_is_hf: bool
) -> tuple[int, list[str]]:
    """(tensors compared, names of those that differ in any byte), tensor by tensor.

    Where a conversion changed the dtype, the source is rounded as it was: `lossy_is_hf` names the
    side it went to.
    """
    hf = build.read_hf_config(str(hf_directory))
    checkpoint = Checkpoint(str(hf_directory))
    reader = megatron_files.CheckpointReader(megatron, hf, topology)
    different, count = [], 0
    for entry in name_table(hf):
        theirs = from_shards(entry, [reader.read(entry.megatron)])
        for (name, shape), tensor in zip(entry.tensors, theirs, strict=True):
            stored = checkpoint.read(name, shape)
            if lossy_is_hf:
                tensor = tensor.to(stored.dtype)
            else:
                stored = stored.to(tensor.dtype)
            count += 1
            if not torch.equal(_bytes(tensor), _bytes(stored)):
                different.append(name)
    return count, different


def compare_logits(
    hf_directory: Path,
    megatron: Path,
    topology: Topology,
    prompts: list[list[int]],
    dtype: torch.dtype | None = None,
) -> LogitDifference:
    """Both models in fp32 on the prompts' ids, transformers' and Megatron's.
    Holds both models in memory.

    With a `dtype` both models' weights are rounded to it first: what a conversion to it did to one
    of them.
    """
    hf = build.read_hf_config(str(hf_directory))
    model = _of_transformers(hf_directory, hf).eval()
    (chunk,) = build.build_model(hf, PolicyConfig(), topology)
    model_state.into_model([chunk], megatron, topology)
    chunk.eval()
    positions = agreeing = 0
    differences, scales = list[Tensor](), list[Tensor]()
    with torch.no_grad():
        for parameter in (*model.parameters(), *chunk.parameters()) if dtype else ():
            parameter.copy_(parameter.to(dtype))
        for ids in prompts:
            ids_BS = torch.tensor([ids], device=next(chunk.parameters()).device)
            position_BS = torch.arange(len(ids), device=ids_BS.device)[None]
            ours = chunk(ids_BS, position_BS, None)[0, :, : hf.vocab_size].float().cpu()
            theirs = model(ids_BS.cpu()).logits[0].float()
            positions += len(ids)
            agreeing += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
            differences.append((ours - theirs).abs().max())
            scales.append(theirs.abs().max())
    difference, scale = (float(torch.stack(each).max()) for each in (differences, scales))
    return LogitDifference(positions, difference, scale, agreeing / positions)


def _of_transformers(directory: Path, hf: PretrainedConfig) -> PreTrainedModel:
    """The model of transformers in fp32. It gets FP8 weights as we read them: its own reading wants
    whole blocks.
    """
    if getattr(hf, "quantization_config", None) is None:
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config, checkpoint = copy.deepcopy(hf), Checkpoint(str(directory))
    del config.quantization_config
    tensors = {
        name: checkpoint.read(name, shape).float()
        for entry in name_table(hf)
        for name, shape in entry.tensors
    }
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(hf)].from_pretrained(
        None, config=config, state_dict=tensors, dtype=torch.float32
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@dataclass(frozen=True)
class Operation:
    """The modules that compute it in both models. `their_input`, `our_input`: it is the module's
    input at this place, not its output. `part`: a part of one product of Megatron's.
    """

    name: str
    theirs: str
    ours: str
    their_input: int | None = None
    our_input: int | None = None
    part: int | None = None


_INPUT_NORM = Operation("input norm", "input_layernorm", "input_layernorm")
_QKV = (
    Operation("query", "self_attn.q_proj", "self_attention.linear_qkv", part=0),
    Operation("key", "self_attn.k_proj", "self_attention.linear_qkv", part=1),
    Operation("value", "self_attn.v_proj", "self_attention.linear_qkv", part=2),
)
_QK_NORMS = (
    Operation("query norm", "self_attn.q_norm", "self_attention.q_layernorm"),
    Operation("key norm", "self_attn.k_norm", "self_attention.k_layernorm"),
)
_ATTENTION = (
    Operation("key with rope", _CACHE, "self_attention.core_attention", our_input=1),
    Operation("attention", "self_attn.o_proj", "self_attention.linear_proj", 0, 0),
    Operation("attention output", "self_attn.o_proj", "self_attention.linear_proj"),
)
_IN_PROJ = "self_attention.in_proj"
_DELTA_NET = (
    Operation("queries, keys and values", "linear_attn.in_proj_qkv", _IN_PROJ, part=0),
    Operation("output gate", "linear_attn.in_proj_z", _IN_PROJ, part=1),
    Operation("beta", "linear_attn.in_proj_b", _IN_PROJ, part=2),
    Operation("decay", "linear_attn.in_proj_a", _IN_PROJ, part=3),
    Operation("delta net", "linear_attn.out_proj", "self_attention.out_proj", 0, 0),
    Operation("delta net output", "linear_attn.out_proj", "self_attention.out_proj"),
)
_SECOND_NORM = Operation("norm after attention", "post_attention_layernorm", "pre_mlp_layernorm")
_EXPERTS = (
    Operation("choice of experts", "mlp.gate", "mlp.router"),
    Operation("experts", "mlp", "mlp"),
)
_MLP = (
    Operation("gate", "mlp.gate_proj", "mlp.linear_fc1", part=0),
    Operation("up", "mlp.up_proj", "mlp.linear_fc1", part=1),
    Operation("silu(gate) up", "mlp.down_proj", "mlp.linear_fc2", 0, 0),
    Operation("down", "mlp.down_proj", "mlp.linear_fc2"),
)


@dataclass(frozen=True)
class OperationDifference:
    """The difference in one operation: the largest |difference|, the largest |value| of
    transformers' result, and the share of values that are bitwise equal.
    """

    name: str
    difference: float
    scale: float
    equal: float

    def within(self, tolerance: float) -> bool:
        """Whether the difference is at most this part of the largest value; NaN is not."""
        return self.difference <= tolerance * self.scale


def operations(hf: PretrainedConfig) -> Iterator[Operation]:
    """The operations in the order of a forward pass; of experts the choice and the sum."""
    fields = megatron_fields(hf)
    yield Operation("embedding", "model.embed_tokens", "embedding")
    for layer, is_sparse in enumerate(sparse_layers(hf)):
        theirs, ours = f"model.layers.{layer}", f"decoder.layers.{layer}"
        feed_forward = _EXPERTS if is_sparse else _MLP
        for each in (_INPUT_NORM, *_attention(fields, layer), _SECOND_NORM, *feed_forward):
            is_cached = each.theirs == _CACHE
            yield dataclasses.replace(
                each,
                name=f"layer {layer}: {each.name}",
                theirs=f"{_CACHE}{layer}" if is_cached else f"{theirs}.{each.theirs}",
                ours=f"{ours}.{each.ours}",
            )
        yield Operation(f"layer {layer}: output", theirs, ours)
    yield Operation("final norm", "model.norm", "decoder.final_layernorm")
    yield Operation("logits", "lm_head", "output_layer")


def _attention(fields: dict[str, Any], layer: int) -> Sequence[Operation]:
    if is_delta_net(fields, layer):
        return _DELTA_NET
    if not fields.get("multi_latent_attention"):
        return (*_QKV, *(_QK_NORMS if fields.get("qk_layernorm") else ()), *_ATTENTION)
    found = []
    for row in attention_rows(fields, layer)[:-1]:  # the last is the output projection
        theirs, ours = (path.removesuffix(".weight") for path in (row.hf, row.megatron))
        found.append(Operation(theirs.removeprefix("self_attn."), theirs, ours))
    return (*found, *_ATTENTION)


def compare_operations(
    ours: nn.Module, theirs: nn.Module, hf: PretrainedConfig, ids: Sequence[int]
) -> list[OperationDifference]:
    """Megatron's whole GPTModel against transformers' on one sequence, operation by operation.

    A norm that TransformerEngine computes inside the next product has no result of its own and
    is left out.
    """
    from megatron.core.transformer.identity_op import IdentityOp

    every = ((each, ours.get_submodule(each.ours)) for each in operations(hf))
    table = [each for each, module in every if not isinstance(module, IdentityOp)]
    mine, other = _ours(ours, hf, ids, table), _theirs(theirs, ids, table)
    return [compared(each.name, mine[each.name], other[each.name]) for each in table]


def last_hidden(ours: nn.Module, hf: PretrainedConfig, ids: Sequence[int]) -> Tensor:
    """The output of Megatron's final norm for one sequence: [P, H]."""
    name = "final norm"
    return _ours(ours, hf, ids, [each for each in operations(hf) if each.name == name])[name]


def _ours(
    model: nn.Module, hf: PretrainedConfig, ids: Sequence[int], table: Sequence[Operation]
) -> dict[str, Tensor]:
    """The results of these operations by name."""
    fused, watched = {entry.megatron: entry for entry in name_table(hf)}, list[Watched]()
    for each in table:
        entry = None if each.part is None else fused[f"{each.ours}.weight"]
        taken = functools.partial(_own, each, entry, hf)
        watched.append((each.name, each.ours, each.our_input, taken))
    with _observing(model, watched) as found:
        ids_BP = torch.tensor([list(ids)], device=next(model.parameters()).device)
        model(ids_BP, torch.arange(len(ids), device=ids_BP.device)[None], None)
    return found


def _theirs(model: nn.Module, ids: Sequence[int], table: Sequence[Operation]) -> dict[str, Tensor]:
    """The same of transformers' model."""
    cached = {each.name: each.theirs for each in table if each.theirs.startswith(_CACHE)}
    read = [each for each in table if each.name not in cached]
    watched = [(each.name, each.theirs, each.their_input, _whole) for each in read]
    with _observing(model, watched) as found:
        ids_BP = torch.tensor([list(ids)], device=next(model.parameters()).device)
        cache = model(ids_BP, use_cache=True).past_key_values
    for name, path in cached.items():
        keys_GPD = cache.layers[int(path.removeprefix(_CACHE))].keys[0]
        found[name] = keys_GPD.transpose(0, 1).flatten(1)
    return found


def first_unequal(compared: Sequence[OperationDifference]) -> OperationDifference | None:
    """The first that is not bitwise equal everywhere."""
    return next((each for each in compared if each.equal < 1), None)


def first_beyond(
    compared: Sequence[OperationDifference], tolerance: float
) -> OperationDifference | None:
    """The first whose difference rounding does not explain."""
    return next((each for each in compared if not each.within(tolerance)), None)


def compared(name: str, ours: Tensor, theirs: Tensor) -> OperationDifference:
    """Two results of one shape, wherever they lie."""
    mine, other = ours.double().cpu(), theirs.double().cpu()
    difference, scale = (mine - other).abs().max(), other.abs().max()
    return OperationDifference(
        name, float(difference), float(scale), float((mine == other).double().mean())
    )


def _own(
    operation: Operation, entry: ParameterMapping | None, hf: PretrainedConfig, value: Any
) -> Tensor:
    """The input or output of one of Megatron's modules, [P, B, ...], as [P, features]."""
    found = value[0] if isinstance(value, tuple) else value
    found = found.reshape(found.shape[0], -1)
    if operation.name == "logits":
        return found[:, : hf.vocab_size]  # without the padding
    if entry is None or operation.part is None:
        return found
    return from_shards(entry, [found.T])[operation.part].T


def _whole(value: Any) -> Tensor:
    """The same of one of transformers' modules, [B, P, ...]; of a router the weights of all
    experts, 0 for those that are not chosen.
    """
    if isinstance(value, tuple) and len(value) == 3:
        logits_PE, weights, chosen = value
        return torch.zeros_like(logits_PE).scatter(1, chosen, weights)
    found = value[0] if isinstance(value, tuple) else value
    return found[0].flatten(1)


@contextlib.contextmanager
def _observing(model: nn.Module, watched: Sequence[Watched]) -> Iterator[dict[str, Tensor]]:
    """A context in which the model evaluates without gradients; its value has by their names what
    the watched modules were given or have returned.
    """
    found: dict[str, Tensor] = {}

    def hook(name: str, path: str, place: int | None, taken: Callable[[Any], Tensor]) -> Any:
        def note(value: Any) -> None:
            # A copy: Megatron adds what comes by on top of a result, in its place.
            found[name] = taken(value).detach().clone()

        module = model.get_submodule(path)
        if place is None:
            return module.register_forward_hook(lambda _, given, value: note(value))
        return module.register_forward_pre_hook(lambda _, given: note(given[place]))

    was = model.training
    model.eval()
    try:
        with contextlib.ExitStack() as hooks, torch.no_grad():
            for each in watched:
                hooks.enter_context(hook(*each))
            yield found
    finally:
        model.train(was)
