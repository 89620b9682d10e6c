"""The way in which an SGLang server fuses, splits and hashes the weights that it receives.

`Expected` hashes the same tensors when they are sent, so that the checksums of both ends can be
compared (POST /weights_checker {"action": "checksum"}). A server fuses q, k, v to qkv_proj and
gate, up to gate_up_proj, splits like Megatron does, and pads its vocabulary with rows of zeros to a
multiple of 64 before it splits it; on a CPU the feed-forward width too, to a multiple of 32 on
every rank. Of latent attention it fuses the down-projections, and every rank has them whole. The
experts of a layer are one w13_weight (gate, up of each) and one w2_weight; on a GPU its kernels may
keep them in an order of their own, so that these are compared on a CPU alone.
"""

from __future__ import annotations

import concurrent.futures
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_stare.config import EngineError
from megatron_stare.numerics.hashes import tile_text, tile_total
from megatron_stare.system import digest

VOCABULARY_MULTIPLE = 64
CPU_WIDTH_MULTIPLE = 32
_Fused = dict[str, tuple[str, ...]]  # the parts of each module
_GATED: _Fused = {"gate_up_proj": ("gate_proj", "up_proj")}
_GROUPED: _Fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
_DELTA: _Fused = {
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
_LATENT: _Fused = {"fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa")}
# Their outputs are split over ranks.
_COLUMNS = {part for parts in (_GATED | _GROUPED).values() for part in parts}
_COLUMNS |= {"q_b_proj", "kv_b_proj", "in_proj_z", "in_proj_b", "in_proj_a", "A_log", "dt_bias"}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_EXPERTS = (".experts.w13_weight", ".experts.w2_weight")
MARGIN_SECONDS = 60.0  # over the time-out of a request, for it to be noticed
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
_DECAY = ".linear_attn.A_log"
_ROUTER, _ROUTER_BIAS = ".mlp.gate.weight", ".mlp.gate.e_score_correction_bias"


def results(
    answers: Sequence[concurrent.futures.Future[Any]], seconds: float | None = None
) -> list[Any]:
    """The results of all answers, when all have ended; raises the first failure. EngineError: some
    have not ended, although each is of a request with a time-out of `seconds`.
    """
    bound = None if seconds is None else seconds + MARGIN_SECONDS
    left = concurrent.futures.wait(answers, bound).not_done
    if left:
        raise EngineError(
            f"{len(left)} of {len(answers)} servers' answers have not ended after {bound:g} s, "
            "longer than their requests may take; see the servers' logs"
        )
    return [answer.result() for answer in answers]


class WeightMismatch(EngineError):
    """A server holds other weights than it was sent."""


def fused_parts(config: Mapping[str, Any]) -> _Fused:
    """The modules that a server fuses, of a model with this config.json, and their parts."""
    if not config.get("kv_lora_rank"):
        return _GATED | _GROUPED | (_DELTA if delta_sections(config) else {})
    return _GATED | _LATENT if config.get("q_lora_rank") else _GATED


def delta_sections(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Heights of the queries, keys and values of a gated delta net, each of which is split over
    ranks for itself; empty of a model without.
    """
    if not config.get("linear_num_value_heads"):
        return ()
    key = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    return key, key, config["linear_num_value_heads"] * config["linear_value_head_dim"]


def precise_weights(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Endings of the names of weights that a server of any dtype holds in fp32."""
    glm = str(config.get("model_type")).startswith("glm4_moe")
    return (_ROUTER_BIAS, _ROUTER, _DECAY) if glm else (_ROUTER_BIAS, _DECAY)


@dataclass(frozen=True)
class ServerLayout:
    """The layout of a server's weights; servers of one layout have the same checksums."""

    tensor_size: int
    dtype: torch.dtype
    on_gpu: bool


class Expected:
    """Checksums that servers of one layout must report, per tensor-parallel rank, built as the
    tensors pass.
    """

    def __init__(self, layout: ServerLayout, config: Mapping[str, Any]) -> None:
        """`config`: the model's config.json."""
        self.layout = layout
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        self.key_value_heads = int(heads)
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        self.experts = next((int(config[name]) for name in names if config.get(name)), 0)
        self.sections, self.precise = delta_sections(config), precise_weights(config)
        self._parts = fused_parts(config)
        self._fused = {part: module for module, parts in self._parts.items() for part in parts}
        # On a GPU a sum stays there until the servers have answered: no tensor waits for its hash.
        self._sums: list[dict[str, str | Tensor]] = [{} for _ in range(layout.tensor_size)]
        self._waiting: dict[str, dict[str, Tensor]] = {}
        self._experts: dict[str, dict[tuple[int, str], Tensor]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Take the next tensor; parts of a fused one are kept until all are there."""
        dtype = torch.float32 if name.endswith(self.precise) else self.layout.dtype
        tensor = tensor.detach().to(dtype)
        if self.sections:  # SGLang's layers of such a model hold their attention themselves
            name = name.replace(".self_attn.", ".")
            if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
                # the weight of a norm that is centred at zero, plus 1
                self._note(f"{name.removesuffix('weight')}gemma_weight", [(name, tensor + 1)])
        if found := _EXPERT.fullmatch(name):
            if not self.layout.on_gpu:
                self._add_expert(found[1], (int(found[2]), found[3]), tensor)
            return
        module, _, kind = name.rpartition(".")
        path, _, last = module.rpartition(".")
        if last not in self._fused:
            self._note(name, [(name, tensor)])
            return
        fused = f"{path}.{self._fused[last]}.{kind}"
        parts = self._waiting.setdefault(fused, {})
        parts[last] = tensor.clone()
        if len(parts) == len(self._parts[self._fused[last]]):
            self._note(fused, [(part, parts[part]) for part in self._parts[self._fused[last]]])
            del self._waiting[fused]

    def _add_expert(self, place: str, part: tuple[int, str], tensor: Tensor) -> None:
        """Take a part of a layer's experts, which are hashed when all have come."""
        parts = self._experts.setdefault(place, {})
        parts[part] = tensor.clone()
        if len(parts) < 3 * self.experts:
            return
        for fused, kinds in (
            ("w13_weight", ("gate_proj", "up_proj")),
            ("w2_weight", ("down_proj",)),
        ):
            those = [
                ("down_proj.weight" if kind == "down_proj" else kind, parts[number, kind])
                for number in range(self.experts)
                for kind in kinds
            ]
            self._note(f"{place}.{fused}", those)
        del self._experts[place]

    def sums(self) -> list[dict[str, str]]:
        """Checksums by name, for each tensor-parallel rank. Sums that are still on a GPU are read
        together.
        """
        places = [
            (sums, name)
            for sums in self._sums
            for name, value in sums.items()
            if isinstance(value, Tensor)
        ]
        if places:
            totals = torch.stack([sums[name] for sums, name in places]).tolist()  # type: ignore[misc]
            for (sums, name), total in zip(places, totals, strict=True):
                sums[name] = tile_text(total)
        return self._sums  # type: ignore[return-value]

    def check(self, server: str, ranks: Sequence[dict[str, Any]]) -> None:
        """WeightMismatch, with the first tensor that differs: a server holds other weights than it
        was sent.
        """
        seen: set[str] = set()
        sent = self.sums()
        for answer in ranks:
            place = answer["parallelism_info"]
            expected = sent[place["tp_rank"]]
            for name, found in answer["checksums"].items():
                if self.layout.on_gpu and name.endswith(_EXPERTS):
                    continue
                # Tied embeddings: a last pipeline stage holds a second copy.
                wanted = expected.get(name) or (
                    expected["model.embed_tokens.weight"] if name in _VOCABULARY else None
                )
                if wanted != found:
                    raise WeightMismatch(
                        f"{server}, rank {place['tp_rank']}: {name} has checksum {found}, "
                        + (f"sent was {wanted}" if wanted else _why_not_sent(name))
                    )
                seen.add(name)
        missing = [name for name in sent[0] if name not in seen]
        if missing:
            raise WeightMismatch(f"{server} holds no {missing[0]}, which was sent")

    def _note(self, name: str, parts: list[tuple[str, Tensor]]) -> None:
        for rank in range(self.layout.tensor_size):
            shards = [self._shard(part, tensor, rank) for part, tensor in parts]
            whole = shards[0] if len(shards) == 1 else torch.cat(shards)
            gpu = self.layout.on_gpu
            self._sums[rank][name] = tile_total(whole) if gpu else cpu_hash(whole)

    def _shard(self, part: str, tensor: Tensor, rank: int) -> Tensor:
        size = self.layout.tensor_size
        width_multiple = 1 if self.layout.on_gpu else size * CPU_WIDTH_MULTIPLE
        if part in _VOCABULARY:
            return _padded(tensor, 0, VOCABULARY_MULTIPLE).chunk(size)[rank]
        if part.endswith(("o_proj.weight", "linear_attn.out_proj.weight")):
            return tensor.chunk(size, dim=1)[rank]
        if part.endswith(("in_proj_qkv", "linear_attn.conv1d.weight")):
            return torch.cat([each.chunk(size)[rank] for each in tensor.split(self.sections)])
        if part.endswith("down_proj.weight"):
            return _padded(tensor, 1, width_multiple).chunk(size, dim=1)[rank]
        if part in ("gate_proj", "up_proj"):
            return _padded(tensor, 0, width_multiple).chunk(size)[rank]
        if part in ("k_proj", "v_proj") and self.key_value_heads < size:
            return tensor.chunk(self.key_value_heads)[
                rank * self.key_value_heads // size
            ]  # replicated heads
        is_split = part.removesuffix(".weight").split(".")[-1] in _COLUMNS
        return tensor.chunk(size)[rank] if is_split else tensor


def _why_not_sent(name: str) -> str:
    if name.split(".")[-2] in _COLUMNS:
        return (
            "but SGLang's own models fuse it with others: the server runs this model by "
            "transformers' code, whose checksums differ; set sglang.verify_weights=false"
        )
    return "and nothing of that name was sent"


def _padded(tensor: Tensor, dim: int, multiple: int) -> Tensor:
    """The tensor followed by zeros along `dim`, up to a multiple."""
    missing = -tensor.shape[dim] % multiple
    if not missing:
        return tensor
    shape = [*tensor.shape[:dim], missing, *tensor.shape[dim + 1 :]]
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=dim)


def cpu_hash(tensor: Tensor) -> str:
    """The first 8 bytes of the SHA-256 of the tensor's bytes, as hexadecimal digits."""
    return digest(bytes_of(tensor), 16)


def bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's bytes in host memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())
