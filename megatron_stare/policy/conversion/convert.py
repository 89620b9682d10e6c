"""Hugging Face <-> Megatron distributed checkpoints, parameter by parameter.

Host memory is bounded by a few copies of the largest parameter, not by the model. A conversion
works in a hidden directory next to TARGET and renames it when it is complete; the next attempt
recognises the files that a killed one finished by their checksums.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_stare.config import UserError
from megatron_stare.policy import build, manifest
from megatron_stare.policy.conversion import megatron_files
from megatron_stare.policy.huggingface import files as hf_files
from megatron_stare.policy.huggingface import peft_files
from megatron_stare.policy.huggingface.checkpoint import (
    Checkpoint,
    FileNames,
    check_agreement,
    with_other_parts,
)
from megatron_stare.policy.huggingface.names import (
    ParameterMapping,
    from_shards,
    joined,
    name_table,
)
from megatron_stare.policy.model import PolicyModel
from megatron_stare.policy.topology import Topology
from megatron_stare.system import atomic_directory, sync_directory, try_lock

PART_BYTES = 256 << 20  # of a Megatron checkpoint: what a kill can cost at most
# Of HF bytes: all of them -> what is then called with those that are done, part by part.
Progress = Callable[[int], Callable[[int], None]]


def _silent(total: int) -> Callable[[int], None]:
    return lambda count: None


def hf_to_megatron(
    source: Path, target: Path, topology: Topology, dtype: str = "", progress: Progress = _silent
) -> int:
    """Write the distributed checkpoint `target` of the HF directory `source`; the bytes read.

    `dtype`: fp32, bf16, or empty for that of each tensor.
    UserError: the source is damaged, disagrees with its config.json, or the target cannot be
    written.
    """
    hf = build.read_hf_config(str(source), "SOURCE")
    checkpoint = Checkpoint(str(source))
    check_agreement(checkpoint, hf)
    table = name_table(hf)
    with _working_directory([source], target, {"to": "megatron", "dtype": dtype}) as working:
        total = sum(checkpoint.bytes_of(entry.hf) for entry in table)
        update = progress(total)
        writer = megatron_files.CheckpointWriter(working, megatron_files.places(hf, topology))
        for number, part in enumerate(_parts(table, checkpoint)):
            writer.add(number, _parameters(part, checkpoint, build.DTYPES.get(dtype)))
            update(sum(checkpoint.bytes_of(entry.hf) for entry in part))
        digests = writer.finish(
            {"source": str(source), "content_metadata": {"non_homogeneous_layers": True}}
        )
        hf_files.copy_description(source, working)
        if dtype:
            hf_files.set_dtype(working, build.DTYPES[dtype])
        manifest.write(working, digests)
    return total


def megatron_to_hf(
    source: Path,
    target: Path,
    topology: Topology,
    dtype: str = "",
    progress: Progress = _silent,
    base: Path | None = None,
) -> int:
    """Write the HF directory `target` of the distributed checkpoint `source`, saved under any
    layout; the bytes written. Adapters are merged into their base.

    Files, their order and their names are those of the directory that the checkpoint came from,
    where it knows them. Of a vision-language model, `base` has the other parts, which are copied.
    `dtype`, UserError: as in `hf_to_megatron`.
    """
    others = with_other_parts(source, base)
    hf = build.read_hf_config(str(source))
    reader: megatron_files.CheckpointReader | megatron_files.MergedReader
    if megatron_files.stored_adapters(source):
        reader = megatron_files.MergedReader(source, hf, topology, base)
    elif base is not None and others is None:
        raise UserError(f"--base {base}: {source} holds whole weights and needs none; leave it out")
    else:
        reader = megatron_files.CheckpointReader(source, hf, topology)
    table, wanted, layout = name_table(hf), build.DTYPES.get(dtype), hf_files.layout_of(source)

    def dtype_of(entry: ParameterMapping) -> torch.dtype:
        return _dtype(entry, wanted) or reader.dtype(entry.megatron)

    parts, shapes = _in_files(table, dtype_of, layout, others)
    sizes = hf_files.sizes_of(shapes)
    if layout is None or {name for file in layout.files for name in file.tensors} != set(shapes):
        layout = hf_files.default_layout(sizes)
    read = [source] if base is None else [source, base]
    with _working_directory(read, target, {"to": "hf", "dtype": dtype}) as working:
        update = progress(sum(sizes.values()))
        journal = manifest.ConversionJournal(working)
        for file in layout.files:
            if file.name not in journal.done:
                own = {name: shapes[name] for name in file.tensors}
                tensors = _hf_tensors(file.tensors, parts, table, reader, wanted, others)
                path = working / file.name
                journal.add(file.name, hf_files.write_file(path, own, tensors, file.metadata))
            update(sum(sizes[name] for name in file.tensors))
        hf_files.copy_description(source, working)
        (working / hf_files.LAYOUT).unlink(missing_ok=True)
        hf_files.write_index(working, layout, sizes)
        if dtype:
            hf_files.set_dtype(working, build.DTYPES[dtype])
        manifest.write(working, journal.close())
    return sum(sizes.values())


def megatron_to_peft(source: Path, target: Path, topology: Topology, dtype: str = "") -> int:
    """Write the PEFT directory `target` of a run's adapters, with the tokenizer's files; the bytes
    of its weight file. `dtype`, UserError: as in `megatron_to_hf`, and where `source` holds whole
    weights.
    """
    if not megatron_files.stored_adapters(source):
        raise UserError(f"{source} holds whole weights and no adapters; use megatron-to-hf")
    hf = build.read_hf_config(str(source))
    adapters = megatron_files.StoredAdapters(source, hf, topology)
    with _working_directory([source], target, {"to": "peft", "dtype": dtype}) as working:
        digests = peft_files.write(
            working,
            hf,
            adapters.settings,
            adapters.stored["base"],
            build.DTYPES.get(dtype, adapters.type),
            adapters.reader.read,
        )
        hf_files.copy_companions(source, working)
        manifest.write(working, digests)
    return (target / peft_files.WEIGHTS).stat().st_size


def _in_files(
    table: list[ParameterMapping],
    dtype_of: Callable[[ParameterMapping], torch.dtype],
    layout: hf_files.DirectoryLayout | None,
    others: Checkpoint | None,
) -> tuple[dict[str, list[str]], hf_files.Shapes]:
    """An export by the names in its files, which are as in those that it came from: the model's
    tensors of which each tensor consists; and all shapes, with those of the other parts of a
    vision-language model.
    """
    model = {name: (shape, dtype_of(entry)) for entry in table for name, shape in entry.tensors}
    if others is not None:
        names = others.names
    else:
        files = layout.files if layout else ()
        names = FileNames.of(name for file in files for name in file.tensors)
    parts, shapes = names.parts(model), hf_files.Shapes()
    for stored, own in parts.items():
        shape, dtype = model[own[0]]
        if len(own) > 1:  # of all experts
            experts = len({name.rpartition(".experts.")[2].partition(".")[0] for name in own})
            shape = (experts, len(own) // experts * shape[0], shape[1])
        shapes[stored] = (shape, dtype)
    for stored, whole in others.carried.items() if others else ():
        shapes[stored] = (whole.shape, whole.dtype)
    return parts, shapes


def _parts(
    table: list[ParameterMapping], checkpoint: Checkpoint
) -> Iterator[list[ParameterMapping]]:
    part: list[ParameterMapping] = []
    filled = 0
    for entry in table:
        part.append(entry)
        filled += checkpoint.bytes_of(entry.hf)
        if filled >= PART_BYTES:
            yield part
            part, filled = [], 0
    if part:
        yield part


def _parameters(
    entries: list[ParameterMapping], checkpoint: Checkpoint, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    for entry in entries:
        parameter = checkpoint.shard(entry)
        yield entry.megatron, parameter.to(_dtype(entry, dtype) or parameter.dtype)


def _hf_tensors(
    stored: tuple[str, ...],
    parts: dict[str, list[str]],
    table: list[ParameterMapping],
    reader: megatron_files.CheckpointReader | megatron_files.MergedReader,
    dtype: torch.dtype | None,
    others: Checkpoint | None,
) -> Iterator[Tensor]:
    """The tensors of a file in order. Those of one parameter that come later are held till then:
    less than a layer.
    """
    entry_of = {name: entry for entry in table for name in entry.hf}
    left = {name for one in stored for name in parts.get(one, ())}
    held: dict[str, Tensor] = {}

    def tensor_of(name: str) -> Tensor:
        entry = entry_of[name]
        if name not in held:
            whole = from_shards(entry, [reader.read(entry.megatron)])
            every = zip(entry.hf, whole, strict=True)
            held.update({other: tensor for other, tensor in every if other in left})
        left.discard(name)
        tensor = held.pop(name)
        return tensor.to(_dtype(entry, dtype) or tensor.dtype)

    for one in stored:
        if others and one in others.carried:
            yield others.carried[one][:]
        else:
            yield joined([tensor_of(name) for name in parts[one]])


def _dtype(entry: ParameterMapping, wanted: torch.dtype | None) -> torch.dtype | None:
    """The dtype of a weight after a conversion to `wanted`; None: the one it has."""
    return wanted and (entry.dtype or wanted)


@contextmanager
def _working_directory(read: Sequence[Path], target: Path, task: dict[str, Any]) -> Iterator[Path]:
    """A locked directory next to `target` that is renamed to it at the end. Files of an earlier
    attempt at the same task, which reads the same directories, are kept there; those of any other
    task are removed.

    UserError: the target is there already, or cannot be written.
    """
    target = hf_files.new_directory(target)
    for each in (directory.resolve() for directory in read):
        if each in (target, *target.parents):
            raise UserError(f"TARGET {target} lies inside {each}; choose a place outside")
    base = target.with_name(f".{target.name}.converting")
    working = base / "content"
    task = task | {"read": {str(each.resolve()): _fingerprint(each) for each in read}}
    try:
        base.mkdir(parents=True, exist_ok=True)
        with (base / "lock").open("w") as lock:
            if not try_lock(lock):
                raise UserError(
                    f"another process is converting to {target}; wait for it or choose another"
                )
            note, text = base / "task", json.dumps(task, sort_keys=True)
            if working.exists() and not (note.is_file() and note.read_text() == text):
                shutil.rmtree(working)
            note.write_text(text)
            working.mkdir(exist_ok=True)
            yield working
            if target.is_dir():
                target.rmdir()
            working.rename(target)
        shutil.rmtree(base)
        sync_directory(target.parent.resolve())
    except OSError as error:
        raise UserError(
            f"{error.filename or target}: {error.strerror or error}; make room or choose another "
            "TARGET (the same command continues where it stopped)"
        ) from None


def _fingerprint(source: Path) -> str:
    """Name, size and time of every file: what must not change between the attempts."""
    stats = [(file.name, file.stat()) for file in sorted(source.iterdir()) if file.is_file()]
    return ";".join(f"{name}:{stat.st_size}:{stat.st_mtime_ns}" for name, stat in stats)


def export_hf(model: PolicyModel, source: Path, directory: Path) -> None:
    """Weights in one safetensors file, with the config and tokenizer files of `source`. Collective.

    The directory appears whole: it is written under a temporary name and renamed. Tensors are
    written as they come: rank 0 holds one at a time, or the experts of one layer where the files
    have all of them in two tensors; the other ranks hold none but their shards.
    """
    stream = iter(dataclasses.replace(model.weights(), onto_first=True))
    try:
        if model.topology.is_first:
            _write_hf(model, stream, source, directory)
    finally:
        for _ in stream:  # the other ranks send to the end, also after an error here
            pass


def _write_hf(
    model: PolicyModel, stream: Iterator[tuple[str, Tensor]], source: Path, directory: Path
) -> None:
    dtype = next(model.chunks[0].parameters()).dtype
    others, layout = with_other_parts(source), hf_files.layout_of(source)
    parts, shapes = _in_files(
        name_table(model.hf), lambda entry: entry.dtype or dtype, layout, others
    )
    carried = (whole[:] for whole in others.carried.values()) if others else ()
    tensors = itertools.chain(_from_stream(stream, parts), carried)
    with atomic_directory(directory) as temporary:
        hf_files.write_file(temporary / hf_files.SINGLE, shapes, tensors, {"format": "pt"})
        hf_files.copy_config(source, temporary)
        hf_files.set_dtype(temporary, dtype)
        hf_files.copy_companions(source, temporary)
        shutil.rmtree(directory, ignore_errors=True)


def _from_stream(
    stream: Iterator[tuple[str, Tensor]], parts: dict[str, list[str]]
) -> Iterator[Tensor]:
    """The tensors of the files, from those of the model in the order of its name table."""
    stored_of = {name: stored for stored, names in parts.items() for name in names}
    held: dict[str, list[Tensor]] = {}
    for name, tensor in stream:
        stored = stored_of[name]
        found = held.setdefault(stored, [])
        found.append(tensor.cpu())
        if len(found) == len(parts[stored]):
            yield joined(held.pop(stored))
