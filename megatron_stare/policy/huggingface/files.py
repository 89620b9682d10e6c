"""The files of a Hugging Face model directory:
which tensors are in which file, the other files of the directory, and writing both.

Written tensor by tensor, so memory is bounded by one of them (the safetensors package wants a
file's tensors at once). Where the layout of a source directory is known, files come out in its
order and, for unchanged bytes, identical.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_stare.config import UserError
from megatron_stare.policy import manifest

COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tekken.json",  # Mistral's own tokenizer
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",  # these three belong to vision-language models
    "video_preprocessor_config.json",
    "processor_config.json",
)
TEMPLATES = "additional_chat_templates"  # a folder: one more template a file, as for tools
# Licences, which must go with the weights, and the code that auto_map of config.json names.
FURTHER = ("LICEN[CS]E*", "NOTICE*", "USE_POLICY*", "*.py")
LAYOUT, INDEX, SINGLE = "hf_layout.json", "model.safetensors.index.json", "model.safetensors"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
_CODES = {dtype: code for code, dtype in DTYPES.items()} | {torch.float8_e4m3fn: "F8_E4M3"}
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype of tensors by name


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a safetensors file, by its header. `code` is the format's own, like BF16."""

    name: str
    code: str
    shape: tuple[int, ...]
    begin: int
    end: int


def new_directory(target: Path) -> Path:
    """The place that `target` means, links followed. UserError: something is there that an atomic
    rename cannot replace.
    """
    target = target.resolve()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UserError(f"TARGET {target} exists already; remove it or choose another")
    if os.path.ismount(target):
        raise UserError(f"TARGET {target} is a mount point; give a directory inside it")
    return target


def read_header(file: Path) -> tuple[list[TensorInfo], dict[str, str]]:
    """A safetensors file's tensors in byte order, and its metadata. UserError: it is damaged."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > file.stat().st_size:
                raise ValueError(f"its header would be {length} bytes long")
            header = json.loads(stream.read(length))
        metadata = header.pop("__metadata__", {})
        infos = [
            TensorInfo(k, v["dtype"], tuple(v["shape"]), *v["data_offsets"])
            for k, v in header.items()
        ]
        infos.sort(key=lambda info: info.begin)
        size = file.stat().st_size
        expected = 8 + length + max((info.end for info in infos), default=0)
        if size != expected:
            raise ValueError(f"{size} bytes, not the {expected} that its header promises")
        return infos, metadata
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is damaged ({error}); fetch it again") from None


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model directory: those of its index, or model.safetensors, or all.
    UserError: none, one that the index names is missing, or an index next to a whole file of which
    it knows nothing (transformers reads the file, SGLang the index).
    """
    index, single = directory / INDEX, directory / SINGLE
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise UserError(f"{index} is damaged ({error}); fetch it again") from None
        if SINGLE not in names and single.is_file():
            raise UserError(
                f"{directory} has {SINGLE} and an {INDEX} of other files; remove the ones that are "
                "left from another model"
            )
        for name in names:
            if not (directory / name).is_file():
                raise UserError(
                    f"{directory}: {name}, which {INDEX} names, is missing; fetch it again"
                )
        return [directory / name for name in names]
    if single.is_file():
        return [single]
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UserError(
            f"{directory}: no *.safetensors there; convert the checkpoint to safetensors first"
        )
    return files


@dataclass(frozen=True)
class FileLayout:
    """One weight file: its tensors in the order of their bytes, and the metadata of its header."""

    name: str
    tensors: tuple[str, ...]
    metadata: dict[str, str]


@dataclass(frozen=True)
class DirectoryLayout:
    """The weight files of a directory, and the metadata of its index."""

    files: tuple[FileLayout, ...]
    index: dict[str, Any]


def layout_of(directory: Path) -> DirectoryLayout | None:
    """The layout of a model directory, or of the one a checkpoint was made from; None: neither."""
    kept = directory / LAYOUT
    if kept.is_file():
        content = json.loads(kept.read_text())
        files = tuple(
            FileLayout(f["name"], tuple(f["tensors"]), f["metadata"]) for f in content["files"]
        )
        return DirectoryLayout(files, content["index"])
    if not any(directory.glob("*.safetensors")):
        return None
    found = []
    for file in weight_files(directory):
        infos, metadata = read_header(file)
        found.append(FileLayout(file.name, tuple(info.name for info in infos), metadata))
    index = directory / INDEX
    of_index = json.loads(index.read_text()).get("metadata", {}) if index.is_file() else {}
    return DirectoryLayout(tuple(found), of_index)


def default_layout(sizes: dict[str, int], file_bytes: int = 5 << 30) -> DirectoryLayout:
    """Files of up to `file_bytes`, tensors in name order. `sizes` in bytes."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name in sorted(sizes):
        if groups[-1] and filled + sizes[name] > file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += sizes[name]
    count = len(groups)
    names = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    files = (
        FileLayout(name, tuple(group), {"format": "pt"})
        for name, group in zip(names if count > 1 else [SINGLE], groups, strict=True)
    )
    return DirectoryLayout(tuple(files), {})


def copy_companions(source: Path, target: Path) -> None:
    """Copy tokenizer, templates, generation defaults, licences and Python code that are there."""
    further = [file.name for pattern in FURTHER for file in source.glob(pattern)]
    for name in (*COMPANIONS, *further):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    if (source / TEMPLATES).is_dir():
        shutil.copytree(
            source / TEMPLATES,
            target / TEMPLATES,
            copy_function=shutil.copyfile,
            dirs_exist_ok=True,
        )


def copy_config(source: Path, target: Path) -> None:
    """config.json, byte by byte; without the number format of weights that were decoded."""
    content = json.loads((source / "config.json").read_text())
    if content.pop("quantization_config", None) is None:
        shutil.copyfile(source / "config.json", target / "config.json")
    else:
        (target / "config.json").write_text(json.dumps(content, indent=2) + "\n")


def set_dtype(directory: Path, dtype: torch.dtype) -> None:
    """Make config.json name the dtype of the weights, of a vision-language model also where it
    describes the text part: servers and transformers take it for theirs.
    """
    path, name = directory / "config.json", str(dtype).removeprefix("torch.")
    content: dict[str, Any] = json.loads(path.read_text())
    parts = (content, content.get("text_config") or {})
    said = [(part, key) for part in parts for key in ("dtype", "torch_dtype") if key in part]
    said = said or [(content, "dtype")]
    if any(part.get(key) != name for part, key in said):
        for part, key in said:
            part[key] = name
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def copy_description(source: Path, target: Path) -> None:
    """All of `source` but the weights: companions, config.json, layout of the weight files."""
    copy_companions(source, target)
    copy_config(source, target)
    layout = layout_of(source)
    if layout is not None:
        (target / LAYOUT).write_text(json.dumps(dataclasses.asdict(layout)))


def sizes_of(shapes: Shapes) -> dict[str, int]:
    """Bytes of each tensor."""
    return {name: dtype.itemsize * math.prod(shape) for name, (shape, dtype) in shapes.items()}


def write_file(
    file: Path, shapes: Shapes, tensors: Iterator[Tensor], metadata: dict[str, str]
) -> str:
    """Write a safetensors file, tensor by tensor in the order of `shapes`; returns its SHA-256."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    sizes, end = sizes_of(shapes), 0
    for name, (shape, dtype) in shapes.items():
        begin, end = end, end + sizes[name]
        header[name] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    stream = manifest.HashedFile(file)
    stream.write(struct.pack("<Q", len(text)) + text)
    for (name, size), tensor in zip(sizes.items(), tensors, strict=True):
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        if len(content) != size:
            raise RuntimeError(f"{name} has {len(content)} bytes, not {size}")
        stream.write(content)
        del content, tensor
    return stream.close()


def write_index(directory: Path, layout: DirectoryLayout, sizes: dict[str, int]) -> None:
    """The index of a directory with more than one weight file."""
    if len(layout.files) == 1 and layout.files[0].name == SINGLE:
        return
    weight_map = {name: file.name for file in layout.files for name in file.tensors}
    metadata = layout.index | {"total_size": sum(sizes.values())}
    content = {"metadata": metadata, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
