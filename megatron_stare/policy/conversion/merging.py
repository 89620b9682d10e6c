"""A run's checkpoint of adapters: with its base as whole weights, or alone as a PEFT directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from megatron_stare.config import AdaptersConfig, UserError
from megatron_stare.policy import build, manifest
from megatron_stare.policy.adapters import STORED_SETTINGS, product, sum_dtype
from megatron_stare.policy.conversion.megatron_files import CheckpointReader
from megatron_stare.policy.huggingface import files as hf_files
from megatron_stare.policy.huggingface import peft_files
from megatron_stare.policy.huggingface.checkpoint import Checkpoint
from megatron_stare.policy.huggingface.names import ParameterMapping, name_table, to_shard
from megatron_stare.policy.huggingface.weights import content_digest, content_hash
from megatron_stare.policy.model_state import common_state, is_distributed
from megatron_stare.policy.topology import Topology


def stored_adapters(source: Path) -> dict[str, Any]:
    """The adapters that the checkpoint describes; empty if it holds whole weights."""
    found: dict[str, Any] = common_state(source).get("adapters", {})
    return found


class _Adapters:
    """The adapters of a run's checkpoint, by their projections."""

    def __init__(self, source: Path, hf: PretrainedConfig, topology: Topology) -> None:
        self.source, self.stored = source, stored_adapters(source)
        known = {name: self.stored[name] for name in STORED_SETTINGS}
        self.settings = AdaptersConfig(**known)
        self.reader = CheckpointReader(source, hf, topology, adapters=True)
        self.of_weight = {each.weight: each for each in peft_files.projections(hf, self.settings)}
        first = next(iter(self.of_weight.values()))
        self.type = self.reader.dtype(first.key("A"))

    def change(self, weight: str, shape: tuple[int, ...]) -> Tensor:
        """alpha / rank B A [O, I] of the weight with this HF name; zeros if it has no adapter."""
        each, wide = self.of_weight.get(weight), sum_dtype(self.type)
        if each is None:
            return torch.zeros(shape, dtype=wide)
        a, b = (self.reader.read(each.key(side)) for side in peft_files.SIDES)
        return self.settings.alpha / self.settings.rank * product(a, b, wide).T


class MergedReader:
    """W + alpha / rank B A by Megatron's names, as engines received it: from one rounding of the
    sum. `base`: the directory of W, if it is not where the run found it.
    """

    def __init__(
        self, source: Path, hf: PretrainedConfig, topology: Topology, base: Path | None = None
    ) -> None:
        self.adapters = _Adapters(source, hf, topology)
        self.directory = directory = base or Path(self.adapters.stored["base"])
        if not directory.is_dir():
            raise UserError(
                f"{source} holds adapters of {directory}, which is not a directory; give the base "
                "model's with --base"
            )
        self.entries = {entry.megatron: entry for entry in name_table(hf)}
        self.base: Checkpoint | CheckpointReader
        if is_distributed(directory):
            self.base = CheckpointReader(directory, hf, topology)
        else:
            self.base = Checkpoint(str(directory))

    def check_base(self) -> None:
        """Reads every weight. UserError: the directory holds other weights than the run's base."""
        found = content_digest(
            (name, 0, content_hash(entry, self._base(entry)))
            for name, entry in self.entries.items()
        )
        wanted = self.adapters.stored["fingerprint"]
        if found != wanted:
            raise UserError(
                f"{self.adapters.source} holds adapters of other weights ({wanted}) than those of "
                f"{self.directory} ({found}); give the directory of their base model with --base"
            )

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of the weight in the run that trained the adapters."""
        return self.entries[name].dtype or self.adapters.type

    def read(self, name: str) -> Tensor:
        """The whole merged parameter."""
        entry = self.entries[name]
        weight = self._base(entry)
        if not any(each in self.adapters.of_weight for each in entry.hf):
            return weight
        changes = [self.adapters.change(each, shape) for each, shape in entry.tensors]
        change = to_shard(entry, changes)
        return (weight.to(change.dtype) + change).to(weight.dtype)

    def _base(self, entry: ParameterMapping) -> Tensor:
        if isinstance(self.base, CheckpointReader):
            weight = self.base.read(entry.megatron)
        else:
            weight = self.base.shard(entry)
        return weight.to(self.dtype(entry.megatron))


def write_peft(source: Path, directory: Path, topology: Topology, dtype: str = "") -> None:
    """The adapters of a run's checkpoint as a PEFT directory, with the tokenizer's files. `dtype`:
    fp32, bf16, or empty for that of the run. UserError: `source` holds whole weights.
    """
    if not stored_adapters(source):
        raise UserError(f"{source} holds whole weights and no adapters; use megatron-to-hf")
    hf = build.read_hf_config(str(source))
    adapters = _Adapters(source, hf, topology)
    digests = peft_files.write(
        directory,
        hf,
        adapters.settings,
        adapters.stored["base"],
        build.DTYPES.get(dtype, adapters.type),
        adapters.reader.read,
    )
    hf_files.copy_companions(source, directory)
    manifest.write(directory, digests)
