"""A Megatron distributed checkpoint read and written parameter by parameter, outside any model.

Where a parameter lies is asked of Megatron-Core itself: a model without storage (the meta device)
names key, global shape and offset of each. So what is written here loads under any layout, and any
layout's checkpoint is read here. A run's checkpoint of adapters is read with its base as whole
weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from transformers import PretrainedConfig

from megatron_stare.config import AdaptersConfig, PolicyConfig, UserError
from megatron_stare.policy import build, manifest, model_state
from megatron_stare.policy.adapters import STORED_SETTINGS, product, sum_dtype
from megatron_stare.policy.huggingface import peft_files
from megatron_stare.policy.huggingface.checkpoint import Checkpoint
from megatron_stare.policy.huggingface.names import ParameterMapping, joined, name_table, to_shard
from megatron_stare.policy.huggingface.weights import content_digest, content_hash
from megatron_stare.policy.topology import Topology


@dataclass(frozen=True)
class Slot:
    """Rows [begin, end) of a parameter: the chunk at `offset` of the global tensor `key`."""

    key: str
    begin: int
    end: int
    offset: tuple[int, ...]
    global_shape: tuple[int, ...]
    stacked: int  # leading axes that the parameter itself lacks: 1 where layers are stacked


@dataclass(frozen=True)
class Places:
    """The places of a model's parameters, and Megatron's extra states: {unique key: content}."""

    slots: dict[str, list[Slot]]
    objects: dict[str, Any]


def places(hf: PretrainedConfig, topology: Topology, stacked_layers: bool = False) -> Places:
    """The places of the whole model, asked of an unsharded GPTModel on the meta device."""
    from megatron.core.dist_checkpointing.mapping import (
        ShardedObject,
        ShardedTensor,
        ShardedTensorFactory,
    )

    (chunk,) = build.build_model(hf, PolicyConfig(), topology, torch.device("meta"))
    slots: dict[str, list[Slot]] = {}
    objects: dict[str, Any] = {}
    sharded = model_state.sharded_weights([chunk], topology, numbered=not stacked_layers)
    for name, item in sharded["model0"].items():
        if isinstance(item, ShardedObject):
            objects[item.unique_key] = item.data
            continue
        pieces = item.build() if isinstance(item, ShardedTensorFactory) else [item]
        begin, found = 0, []
        for piece in pieces:
            assert isinstance(piece, ShardedTensor), f"{name}: {type(piece)}"
            end = begin + piece.local_shape[0]
            place = (piece.global_offset, piece.global_shape, piece.prepend_axis_num)
            found.append(Slot(piece.key, begin, end, *place))
            begin = end
        slots[name] = found
    return Places(slots, objects)


class CheckpointReader:
    """The parameters of a distributed checkpoint by their names in the model, or with `adapters`
    its adapters by their keys. UserError: not one, or damaged.
    """

    def __init__(
        self, directory: Path, hf: PretrainedConfig, topology: Topology, adapters: bool = False
    ) -> None:
        self.directory = directory
        self.storage = FileSystemReader(directory)
        self.metadata = model_state.read_metadata(directory)
        self.storage.set_up_storage_reader(self.metadata, is_coordinator=True)
        self.keys = self.metadata.state_dict_metadata
        if adapters:
            self.places = Places(dict(self._adapters()), {})
            return
        stacked = "decoder.layers.self_attention.linear_qkv.weight" in self.keys
        self.places = places(hf, topology, stacked_layers=stacked)
        self._check(hf)

    def _adapters(self) -> Iterator[tuple[str, list[Slot]]]:
        for key, entry in self.keys.items():
            if key.startswith("adapters.") and isinstance(entry, TensorStorageMetadata):
                shape = tuple(entry.size)
                yield key, [Slot(key, 0, shape[0], (0,) * len(shape), shape, 0)]

    def dtype(self, name: str) -> torch.dtype:
        """The stored dtype of a parameter."""
        return self._entry(self.places.slots[name][0]).properties.dtype

    def read(self, name: str) -> Tensor:
        """The whole parameter, vocabulary padding not included."""
        return joined([self._read(slot) for slot in self.places.slots[name]])

    def _read(self, slot: Slot) -> Tensor:
        entry = self._entry(slot)
        rows = slot.end - slot.begin
        sizes = (1,) * slot.stacked + (rows, *slot.global_shape[slot.stacked + 1 :])
        chunk = ChunkStorageMetadata(torch.Size(slot.offset), torch.Size(sizes))
        items = create_read_items_for_chunk_list(slot.key, entry, [chunk])
        covered = sum(item.lengths.numel() for item in items)
        if covered != chunk.sizes.numel():
            raise UserError(
                f"{self.directory}: {slot.key} has {covered} of {chunk.sizes.numel()} values; "
                "restore it"
            )
        try:
            if len(items) == 1 and items[0].storage_index.offset == torch.Size(slot.offset):
                whole = self._load(items[0].storage_index)
                if tuple(whole.shape) == sizes:
                    return whole.reshape(sizes[slot.stacked :])
            target = torch.empty(sizes, dtype=entry.properties.dtype)
            self.storage.read_data(LoadPlan(items), _Into(target)).wait()  # type: ignore[arg-type]
        except (OSError, RuntimeError, EOFError, ValueError) as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"{self.directory}: {slot.key} cannot be read ({first}); restore the checkpoint"
            ) from None
        return target.reshape(sizes[slot.stacked :])

    def _load(self, index: MetadataIndex) -> Tensor:
        """A stored chunk as it is, without the second copy that torch's reader would make of it."""
        info = self.metadata.storage_data[index]
        with (self.directory / info.relative_path).open("rb") as file:
            return torch.load(
                self.storage._slice_file(file, info), map_location="cpu", weights_only=True
            )

    def _entry(self, slot: Slot) -> TensorStorageMetadata:
        entry = self.keys.get(slot.key)
        if not isinstance(entry, TensorStorageMetadata):
            raise UserError(
                f"{self.directory}: no tensor {slot.key}, which config.json implies "
                "(num_hidden_layers, model_type, tie_word_embeddings); correct config.json or take "
                "the checkpoint that belongs to it"
            )
        return entry

    def _check(self, hf: PretrainedConfig) -> None:
        """Every tensor of the model is there in the right shape, and none is left over."""
        wanted = {slot.key: slot for slots in self.places.slots.values() for slot in slots}
        for key, slot in wanted.items():
            size, want = tuple(self._entry(slot).size), slot.global_shape
            vocabulary = key in ("embedding.word_embeddings.weight", "output_layer.weight")
            rows = max(size[0], want[0]) if vocabulary else want[0]  # it may be padded
            if size != (rows, *want[1:]):
                raise UserError(
                    f"{self.directory}: {key} has shape {size} but config.json implies {want}; "
                    "correct config.json or take the checkpoint that belongs to it"
                )
        for key, entry in self.keys.items():
            foreign = key.startswith(model_state.TRAINING_PREFIXES) or not isinstance(
                entry, TensorStorageMetadata
            )
            if key not in wanted and not foreign and "_extra_state" not in key:
                raise UserError(
                    f"{self.directory}: tensor {key} has no place in the model that config.json "
                    "describes; correct config.json (num_hidden_layers, tie_word_embeddings, "
                    "model_type)"
                )


class _Into:
    """What torch's reader needs of a planner, for one target tensor."""

    def __init__(self, target: Tensor) -> None:
        self.target = target

    def resolve_tensor(self, item: ReadItem) -> Tensor:
        assert item.type == LoadItemType.TENSOR
        view = self.target
        for axis, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            view = view.narrow(axis, start, length)
        return view

    def commit_tensor(self, item: ReadItem, tensor: Tensor) -> None:
        pass


def stored_adapters(source: Path) -> dict[str, Any]:
    """The adapters that the checkpoint describes; empty if it holds whole weights."""
    found: dict[str, Any] = model_state.common_state(source).get("adapters", {})
    return found


class StoredAdapters:
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
    sum. `base`: the directory of W, if it is not where the run found it; every weight of it is read
    first. UserError: it holds other weights than the run's base.
    """

    def __init__(
        self, source: Path, hf: PretrainedConfig, topology: Topology, base: Path | None
    ) -> None:
        self.adapters = StoredAdapters(source, hf, topology)
        self.directory = directory = base or Path(self.adapters.stored["base"])
        if not directory.is_dir():
            raise UserError(
                f"{source} holds adapters of {directory}, which is not a directory; give the base "
                "model's with --base"
            )
        self.entries = {entry.megatron: entry for entry in name_table(hf)}
        self.base: Checkpoint | CheckpointReader
        if model_state.is_distributed(directory):
            self.base = CheckpointReader(directory, hf, topology)
        else:
            self.base = Checkpoint(str(directory))
        self._check_base()

    def _check_base(self) -> None:
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


class CheckpointWriter:
    """Writes a distributed checkpoint in parts; those in the journal survive a kill."""

    def __init__(self, directory: Path, places: Places) -> None:
        self.directory, self.places = directory, places
        self.journal = manifest.ConversionJournal(directory)

    def add(self, number: int, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Write part `number` with these parameters, unless an earlier attempt finished it."""
        name = f"__0_{number}.distcp"
        if name in self.journal.done:
            return
        tensors = (
            piece for parameter, tensor in parameters for piece in self._pieces(parameter, tensor)
        )
        self._write(name, tensors)

    def finish(self, common: dict[str, Any]) -> dict[str, str]:
        """Write common state, extra states and Megatron's metadata; the digests of the parts."""
        from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
        from megatron.core.dist_checkpointing.mapping import ShardedObject

        common_key = ShardedObject("common_state", None, (1,), (0,)).unique_key
        objects = {common_key: common} | self.places.objects
        contents = ((key, (), (), [content]) for key, content in objects.items())
        self._write("__0_objects.distcp", contents)
        whole = {slot.key: slot.global_shape for own in self.places.slots.values() for slot in own}
        entries: dict[str, Any] = {}
        results = []
        for file, part in self.journal.done.items():
            for key, offset, sizes, dtype, position, length in part["items"]:
                index = MetadataIndex(key, torch.Size(offset)) if dtype else MetadataIndex(key)
                results.append(WriteResult(index, length, _StorageInfo(file, position, length)))
                if not dtype:
                    entries[key] = BytesStorageMetadata()
                    continue
                properties = TensorProperties(dtype=getattr(torch, dtype))
                size = torch.Size(whole[key])
                entry = entries.setdefault(key, TensorStorageMetadata(properties, size, []))
                entry.chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes)))
        FileSystemWriter(self.directory).finish(Metadata(entries), [results])
        save_config(CheckpointingConfig("torch_dist", 1), str(self.directory))
        return self.journal.close()

    def _pieces(
        self, parameter: str, tensor: Tensor
    ) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]:
        for slot in self.places.slots[parameter]:
            piece = tensor[slot.begin : slot.end]
            sizes = (1,) * slot.stacked + tuple(piece.shape)
            if piece.untyped_storage().nbytes() != piece.numel() * piece.itemsize:
                piece = piece.clone()  # torch.save writes the whole storage behind a view
            yield slot.key, slot.offset, sizes, piece.reshape(sizes)

    def _write(
        self, name: str, contents: Iterable[tuple[str, tuple[int, ...], tuple[int, ...], Any]]
    ) -> None:
        items = []
        stream = manifest.HashedFile(self.directory / name)
        for key, offset, sizes, content in contents:
            position = stream.tell()
            dtype = str(content.dtype).removeprefix("torch.") if isinstance(content, Tensor) else ""
            torch.save(content, stream)  # type: ignore[arg-type]
            items.append((key, offset, sizes, dtype, position, stream.tell() - position))
        self.journal.add(name, stream.close(), items=items)
