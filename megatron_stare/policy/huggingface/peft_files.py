"""Adapters in files, under PEFT's names: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from megatron_stare.config import AdaptersConfig, UserError
from megatron_stare.policy.huggingface import files as hf_files
from megatron_stare.policy.huggingface.checkpoint import Stored
from megatron_stare.policy.huggingface.names import Layout, ParameterMapping, name_table

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SIDES = ("A", "B")
_ADAPTED = re.compile(
    r"decoder\.layers\.(\d+)\.(self_attention\.linear_\w+|mlp\.(?:shared_experts\.)?linear_fc\d"
    r"|mlp\.experts\.local_experts\.\d+\.linear_fc\d)\.weight"
)
# Of latent attention, which has down-projections to latent vectors: its name in adapters.targets.
_LATENT = {"q_a_proj": "q", "q_b_proj": "q", "kv_a_proj_with_mqa": "k", "kv_b_proj": "k"}
# Options of PEFT beyond y = x W^T + lora_alpha / r (x A^T) B^T, and the value that leaves each out.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    **dict.fromkeys(("use_rslora", "use_dora", "fan_in_fan_out", "lora_bias"), (False, None)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), ({}, None)),
    **dict.fromkeys(("modules_to_save", "layers_to_transform", "layer_replication"), (None, [])),
    # The other ways to begin (pissa, olora, corda, loftq, lora_ga) also change the base weights.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", "mica"),
}


@dataclass(frozen=True)
class Projection:
    """A projection that has an adapter. `shape`: [O, I] of its weight, `leaf`: q_proj, ..."""

    entry: ParameterMapping
    layer: int
    fused: str  # the module of Megatron-Core's layer that computes it: mlp.linear_fc1, ...
    place: str  # of the adapter in its layer: linear_fc1, experts.3.linear_fc1, ...
    leaf: str
    weight: str  # its HF name
    shape: tuple[int, ...]

    @property
    def target(self) -> str:
        """Its name in adapters.targets."""
        return _LATENT.get(self.leaf, self.leaf.removesuffix("_proj"))

    def key(self, side: str) -> str:
        """The name of A or B in a checkpoint of a run."""
        return f"adapters.{self.layer}.{self.place}.lora_{side}.{self.leaf}"

    def name(self, side: str) -> str:
        """The name of A or B in PEFT's file."""
        return f"base_model.model.{self.weight.removesuffix('.weight')}.lora_{side}.weight"

    def shape_of(self, side: str, rank: int) -> tuple[int, ...]:
        """A [R, I], B [O, R]."""
        outputs, inputs = self.shape
        return (rank, inputs) if side == "A" else (outputs, rank)


def projections(hf: PretrainedConfig, settings: AdaptersConfig) -> list[Projection]:
    """The projections of a model that have an adapter, in the order of its layers."""
    found = []
    for entry in name_table(hf):
        match = _ADAPTED.fullmatch(entry.megatron)
        if not match or (entry.expert is not None and settings.experts == "none"):
            continue
        place = match[2].partition(".")[2].replace("local_experts.", "")
        if entry.expert is not None and settings.experts == "shared":
            place = place.replace(f".{entry.expert}.", ".")
        for name, shape in entry.tensors:
            leaf = name.split(".")[-2]
            found.append(Projection(entry, int(match[1]), match[2], place, leaf, name, shape))
    return [each for each in found if each.target in settings.target_names]


def adapter_table(hf: PretrainedConfig, settings: AdaptersConfig) -> list[ParameterMapping]:
    """A and B of every projection as parameters of their own: their keys in a checkpoint, their
    names in PEFT's file, and how ranks divide them (policy/adapters.py).
    """
    table = []
    for each in projections(hf, settings):
        for side in SIDES:
            layout: Layout = "replicated"
            if each.entry.expert is None and side == "A" and each.entry.layout == "columns":
                layout = "columns"
            if each.entry.expert is None and side == "B" and each.entry.layout in ("qkv", "rows"):
                layout = "rows"
            shapes = (each.shape_of(side, settings.rank),)
            table.append(ParameterMapping(each.key(side), (each.name(side),), layout, shapes))
    return table


def peft_config(hf: PretrainedConfig, settings: AdaptersConfig, base: str) -> dict[str, Any]:
    """The content of adapter_config.json."""
    alpha, found = settings.alpha, projections(hf, settings)
    return {name: values[0] for name, values in _PLAIN.items()} | {
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({each.leaf for each in found}),
        "inference_mode": True,
    }


def check_apart(hf: PretrainedConfig, settings: AdaptersConfig) -> None:
    """UserError: engines do not apply adapters of all these projections."""
    has_experts = any(entry.expert is not None for entry in name_table(hf))
    for each in projections(hf, settings):
        if each.leaf in _LATENT or (has_experts and each.fused.startswith("mlp.")):
            raise UserError(
                "adapters.merge=false is not supported for latent attention and for feed-forward "
                f"layers of models with experts, and {each.weight} has an adapter; set "
                "adapters.merge=true, or adapters.targets without it"
            )


def write(
    directory: Path,
    hf: PretrainedConfig,
    settings: AdaptersConfig,
    base: str,
    dtype: torch.dtype,
    read: Callable[[str], Tensor],
) -> dict[str, str]:
    """Write PEFT's two files; {weight file: SHA-256}. `read(key)` gives a whole A or B."""
    content = peft_config(hf, settings, base)
    (directory / CONFIG).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    table = sorted(adapter_table(hf, settings), key=lambda each: each.hf)
    shapes = {name: (shape, dtype) for each in table for name, shape in each.tensors}
    tensors = (read(each.megatron).to(dtype) for each in table)
    return {WEIGHTS: hf_files.write_file(directory / WEIGHTS, shapes, tensors, {"format": "pt"})}


class PeftDirectory:
    """A directory that PEFT or `convert megatron-to-peft` wrote. UserError: it is not one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            self.config: dict[str, Any] = json.loads((directory / CONFIG).read_text())
        except (OSError, ValueError) as error:
            raise UserError(
                f"adapters.start={directory}: {CONFIG} cannot be read ({error}); give a "
                "directory that peft's save_pretrained or `convert megatron-to-peft` wrote"
            ) from None
        if not (directory / WEIGHTS).is_file():
            raise UserError(
                f"adapters.start={directory} has no {WEIGHTS}; save the adapters again with peft's "
                "save_pretrained(safe_serialization=True)"
            )
        infos, _ = hf_files.read_header(directory / WEIGHTS)
        self.infos = {info.name: info for info in infos}

    def check(self, hf: PretrainedConfig, settings: AdaptersConfig) -> None:
        """UserError: these are not the adapters that `settings` describe, of a model like `hf`."""
        for name, plain in _PLAIN.items():
            if self.config.get(name, plain[0]) not in plain:
                self._refuse(f"has {name}={self.config[name]}, which is not supported here")
        for name, ours, theirs in (
            ("rank", settings.rank, self.config.get("r")),
            ("alpha", settings.alpha, self.config.get("lora_alpha")),
        ):
            if ours != theirs:
                self._refuse(f"says {theirs}, and adapters.{name}={ours}; set both alike")
        wanted = dict(named for each in adapter_table(hf, settings) for named in each.tensors)
        for name in sorted(wanted.keys() - self.infos.keys()):
            self._refuse(f"has no {name}; set adapters.targets to the projections that it has")
        for name in sorted(self.infos.keys() - wanted.keys()):
            self._refuse(
                f"has {name}, which the run would not have; set adapters.targets to the "
                "projections that it has, and policy.hf_checkpoint to their base model"
            )
        for name, shape in wanted.items():
            info = self.infos[name]
            if info.shape != shape or info.code not in hf_files.DTYPES:
                self._refuse(
                    f"has {name} with shape {info.shape} in {info.code}, and the model of "
                    f"policy.hf_checkpoint implies {shape}; take adapters of this model"
                )
        self._check_shared(hf, settings)

    def _check_shared(self, hf: PretrainedConfig, settings: AdaptersConfig) -> None:
        """PEFT has no shared adapters: each expert has a copy, and all copies must be equal."""
        first: dict[str, tuple[str, Tensor]] = {}
        for each in projections(hf, settings) if settings.experts == "shared" else ():
            for side in SIDES if each.entry.expert is not None else ():
                name, values = each.name(side), self.read(each.name(side))
                one, expected = first.setdefault(each.key(side), (name, values))
                if not torch.equal(values, expected):
                    self._refuse(
                        f"has other values in {name} than in {one}, and adapters.experts=shared; "
                        "set adapters.experts=each"
                    )

    def _refuse(self, what: str) -> None:
        raise UserError(f"adapters.start={self.directory} {what}")

    def read(self, name: str) -> Tensor:
        """The tensor with this name."""
        return Stored(self.directory / WEIGHTS, self.infos[name])[:]
