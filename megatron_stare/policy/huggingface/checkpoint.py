"""An HF directory's tensors, and whether config.json describes them, before any is read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PretrainedConfig

from megatron_stare.config import UserError
from megatron_stare.policy.huggingface.block_fp8 import BLOCK, SCALE, decode
from megatron_stare.policy.huggingface.families import (
    FAMILIES,
    VISION_LANGUAGE,
    check_supported,
    megatron_fields,
)
from megatron_stare.policy.huggingface.files import DTYPES, TensorInfo, read_header, weight_files
from megatron_stare.policy.huggingface.names import ParameterMapping, name_table, to_shard

# The text part of a vision-language model: its weights are named model.language_model.layers...
_TEXT_PART, _MODEL = "model.language_model.", "model."
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"^model\.layers\.\d+\.mlp\.experts\.(\d+)\.")
# All experts of a layer in two tensors, [E, 2M, H] and [E, H, M]: as Qwen3.5 is published, and as
# transformers holds them in memory.
_ALL_EXPERTS = re.compile(
    r"^(model\.(?:language_model\.)?layers\..*\.experts)\.(gate_up|down)_proj$"
)
_ONE_EXPERT = re.compile(r"^(model\.layers\.\d+\.mlp\.experts)\.\d+\.(gate|up|down)_proj\.weight$")
_MATRICES = {"gate_up": ("gate", "up"), "down": ("down",)}  # of one expert, one after another
_DERIVED = "rotary_emb.inv_freq"  # a buffer that old checkpoints carry and no model needs
_COMPARED_ROWS = 4096
_BLOCKS = "F8_E4M3"  # the codes of block_fp8.py


@dataclass(frozen=True)
class FileNames:
    """The names of the model's tensors in the files of a checkpoint. `text_part`: they are those of
    a vision-language model; `all_experts`: the experts of a layer are in two tensors.
    """

    text_part: bool = False
    all_experts: bool = False

    @classmethod
    def of(cls, names: Iterable[str]) -> FileNames:
        """The convention of files with these names."""
        known = list(names)
        return cls(
            any(name.startswith(_TEXT_PART) for name in known),
            any(_ALL_EXPERTS.match(name) for name in known),
        )

    def parts(self, names: Iterable[str]) -> dict[str, list[str]]:
        """{name in the files: the model's tensors of which it consists, in the order of the bytes}.
        `names`: those of the model's tensors, in the order of its name table.
        """
        found: dict[str, list[str]] = {}
        for name in names:
            stored = self._in_files(name)
            if self.all_experts and (expert := _ONE_EXPERT.match(name)):
                matrix = next(each for each, own in _MATRICES.items() if expert[2] in own)
                stored = self._in_files(f"{expert[1]}.{matrix}_proj")
            found.setdefault(stored, []).append(name)
        return found

    def _in_files(self, name: str) -> str:
        return name.replace(_MODEL, _TEXT_PART, 1) if self.text_part else name


@dataclass(frozen=True)
class Stored:
    """A tensor of a safetensors file, or some rows of one expert's matrix in the tensor of all
    experts of a layer; `info` has its name in the file, and its own shape and bytes. An index or
    slice of it reads what it names and no more. UserError: the file is damaged.
    """

    file: Path
    info: TensorInfo
    expert: int | None = None
    first_row: int = 0  # in the expert's matrix

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.info.code]

    def __getitem__(self, index: Any, /) -> Tensor:
        if self.expert is not None:
            first, *rest = index if isinstance(index, tuple) else (index,)
            top, bottom, _ = first.indices(self.info.shape[0])
            index = (self.expert, slice(self.first_row + top, self.first_row + bottom), *rest)
        try:
            with safe_open(self.file, framework="pt") as content:
                return content.get_slice(self.info.name)[index]
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{self.file} is damaged ({str(error).splitlines()[0]}); fetch it again"
            ) from None


@dataclass(frozen=True)
class StoredBlocks:
    """A matrix in blocks of E4M3, where it lies. A slice of it reads the blocks that it touches,
    and is rounded to bf16 as the checkpoint's publishers convert it.
    """

    code: Stored
    scale: Stored
    shape: tuple[int, ...]
    dtype = torch.bfloat16

    def __getitem__(self, index: Any, /) -> Tensor:
        parts = (*(index if isinstance(index, tuple) else (index,)), slice(None))
        (top, bottom, _), (left, right, _) = (
            part.indices(size) for part, size in zip(parts, self.shape, strict=False)
        )
        first, start = top // BLOCK, left // BLOCK
        code_OI = self.code[first * BLOCK : bottom, start * BLOCK : right]
        scale_bb = self.scale[first : -(-bottom // BLOCK), start : -(-right // BLOCK)]
        value_OI = decode(code_OI, scale_bb.float())
        return value_OI[top - first * BLOCK :, left - start * BLOCK :].bfloat16()


class Checkpoint:
    """The safetensors of an HF directory, read tensor by tensor. UserError:
    no files, or a file that is damaged.

    Of a vision-language model, `tensors` has the text part, by the names that it has alone;
    `carried` has all other tensors, by their own names. A tensor of all experts of a layer appears
    as those of single experts. `names`: the convention of the files.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.tensors: dict[str, Stored] = {}
        for file in weight_files(Path(directory)):
            for info in read_header(file)[0]:
                if other := self.tensors.get(info.name):
                    raise UserError(
                        f"{directory}: {other.file.name} and {file.name} both have {info.name}; "
                        "remove the files that are left from another model"
                    )
                self.tensors[info.name] = Stored(file, info)
        self.carried: dict[str, Stored | StoredBlocks] = {}
        self.names = FileNames.of(self.tensors)
        if self.names.text_part:
            self._set_others_aside()
        for name in [name for name in self.tensors if _ALL_EXPERTS.match(name)]:
            self._take_apart(name)

    def _set_others_aside(self) -> None:
        others = [n for n in self.tensors if not n.startswith((_TEXT_PART, "lm_head."))]
        scales = self.scales
        for name in others:
            if name not in scales:
                self.carried[name] = self.stored(name, self.tensors[name].info.shape)
        for name in others:
            del self.tensors[name]
        for name in [name for name in self.tensors if name.startswith(_TEXT_PART)]:
            self.tensors[name.replace(_TEXT_PART, _MODEL)] = self.tensors.pop(name)

    def _take_apart(self, name: str) -> None:
        """Replace the tensor of all experts by those of each."""
        experts, matrix = _ALL_EXPERTS.match(name).groups()  # type: ignore[union-attr]
        matrices, whole = _MATRICES[matrix], self.tensors[name]
        info = whole.info
        if len(info.shape) != 3 or info.shape[1] % len(matrices):
            return  # it has no place in the model
        del self.tensors[name]
        count, height, width = info.shape
        height //= len(matrices)
        size = (info.end - info.begin) // (count * len(matrices))
        for number in range(count * len(matrices)):
            expert, place = divmod(number, len(matrices))
            own = f"{experts}.{expert}.{matrices[place]}_proj.weight"
            if own in self.tensors:
                raise UserError(
                    f"{whole.file}: {name} holds {own}, which {self.tensors[own].file} has too; "
                    "remove one of them"
                )
            begin = info.begin + number * size
            part = TensorInfo(info.name, info.code, (height, width), begin, begin + size)
            self.tensors[own] = Stored(whole.file, part, expert, place * height)

    def bytes_of(self, names: tuple[str, ...]) -> int:
        """The number of bytes that the named tensors take in the files."""
        infos = (self.tensors[name].info for name in names)
        return sum(info.end - info.begin for info in infos)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `name`. UserError: missing, or not of the shape that config.json implies."""
        return self.stored(name, shape)[:]

    def stored(self, name: str, shape: tuple[int, ...]) -> Stored | StoredBlocks:
        """The tensor `name` where it lies, to read slices of. UserError as in `read`."""
        self.check(name, shape)
        plain = self.tensors[name]
        if plain.info.code != _BLOCKS:
            return plain
        return StoredBlocks(plain, self.tensors[f"{name}{SCALE}"], shape)

    def shard(self, entry: ParameterMapping, tensor_size: int = 1, rank: int = 0) -> Tensor:
        """Megatron's shard of a parameter, of which no more is read. UserError as in `read`."""
        sources = [self.stored(name, shape) for name, shape in entry.tensors]
        return to_shard(entry, sources, tensor_size, rank)

    @property
    def scales(self) -> set[str]:
        """The names that the scales of matrices in blocks have."""
        return {f"{name}{SCALE}" for name, own in self.tensors.items() if own.info.code == _BLOCKS}

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """UserError as in `read`, and for a dtype that is not a plain floating-point one, nor E4M3
        with scales of its blocks.
        """
        if name not in self.tensors and name.endswith(SCALE):
            raise UserError(
                f"{self.directory}: tensor {name} is missing, the scales of a matrix in F8_E4M3; "
                "take a whole FP8 block checkpoint, or take the unquantised weights"
            )
        if name not in self.tensors:
            raise UserError(
                f"{self.directory}: tensor {name} is missing; config.json and weights do not "
                "belong together"
            )
        info, file = self.tensors[name].info, self.tensors[name].file
        if info.shape != shape:
            raise UserError(
                f"{file}: {name} has shape {info.shape} but config.json implies {shape}; "
                "correct config.json or take the weights that belong to it"
            )
        if info.code == _BLOCKS and len(shape) == 2:
            self.check(f"{name}{SCALE}", tuple(-(-size // BLOCK) for size in shape))
        elif info.code not in DTYPES:
            raise UserError(
                f"{file}: {name} has dtype {info.code}, not one of {', '.join(DTYPES)}; take the "
                "unquantised weights"
            )

    def further(self, hf: PretrainedConfig) -> list[str]:
        """Tensors of the layers that predict further tokens, which are not trained."""
        layers = _further_layers(hf)
        matches = ((name, _LAYER.match(name)) for name in sorted(self.tensors))
        return [name for name, layer in matches if layer and int(layer[1]) in layers]


def with_other_parts(source: Path, base: Path | None = None) -> Checkpoint | None:
    """The Hugging Face checkpoint with the parts of a model that are not text, which an export of
    `source` needs: `source` itself or `base`. None: the model, of which source has the config.json,
    has no such parts.
    """
    content = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if content.get("model_type") not in VISION_LANGUAGE:
        return None
    directory = base or source
    found = Checkpoint(str(directory)) if any(directory.glob("*.safetensors")) else None
    if found is None or not found.names.text_part:
        raise UserError(
            f"{directory} has only the text part of a {content['model_type']} model; give the "
            "published Hugging Face directory (convert: --base)"
        )
    return found


def check_agreement(checkpoint: Checkpoint, hf: PretrainedConfig) -> None:
    """UserError with the field of config.json, its value, that of the weights, and the remedy."""
    check_supported(hf)
    _check_quantization(checkpoint, hf)
    for field, said, found in _comparisons(checkpoint, hf):
        if said != found:
            raise UserError(
                f"{checkpoint.directory}: config.json says {field}={said} but the weights have "
                f"{found}; correct config.json or take the weights that belong to it"
            )
    _check_tied(checkpoint, hf)
    _check_rope(checkpoint, hf)
    shapes = dict(named for entry in name_table(hf) for named in entry.tensors)
    known = {*shapes, *checkpoint.scales, *checkpoint.further(hf)}
    known |= {"lm_head.weight"} if hf.tie_word_embeddings else set()
    for name in sorted(checkpoint.tensors.keys() - known):
        if not name.endswith(_DERIVED):
            raise UserError(
                f"{checkpoint.tensors[name].file}: tensor {name} has no place in the model that "
                "config.json describes; correct config.json (tie_word_embeddings, "
                "num_hidden_layers, model_type)"
            )
    for name, shape in shapes.items():
        checkpoint.check(name, shape)


def _check_quantization(checkpoint: Checkpoint, hf: PretrainedConfig) -> None:
    said = dict(getattr(hf, "quantization_config", None) or {})
    needs = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    for field, need in needs.items() if said else ():
        if said.get(field) != need:
            raise UserError(
                f"{checkpoint.directory}/config.json: quantization_config has {field}="
                f"{said.get(field)!r}, and {need!r} alone can be read; take the unquantised weights"
            )


def _comparisons(checkpoint: Checkpoint, hf: PretrainedConfig) -> list[tuple[str, int, int]]:
    """(field, config.json's value, the weights' value) of each field that shapes determine."""
    names = checkpoint.tensors
    fields, ours = megatron_fields(hf), FAMILIES[hf.model_type].fields
    head = fields["kv_channels"]
    found: list[tuple[str, int, int]] = []

    def rows(field: str, name: str, per: int = 1, axis: int = 0) -> None:
        if name in names:
            found.append((field, getattr(hf, field), names[name].info.shape[axis] // per))

    rows("vocab_size", "model.embed_tokens.weight")
    rows("hidden_size", "model.embed_tokens.weight", axis=1)
    layers = {int(match[1]) for name in names if (match := _LAYER.match(name))}
    layers -= set(_further_layers(hf))
    found.append(("num_hidden_layers", hf.num_hidden_layers, max(layers, default=-1) + 1))
    query = 2 * head if fields.get("attention_output_gate") else head
    rows("num_attention_heads", "model.layers.0.self_attn.q_proj.weight", query)
    rows("num_key_value_heads", "model.layers.0.self_attn.k_proj.weight", head)
    rows("intermediate_size", "model.layers.0.mlp.gate_proj.weight")
    experts = {int(match[1]) for name in names if (match := _EXPERT.match(name))}
    if experts:
        said = ours.get("num_moe_experts", "num_experts")
        found.append((said, getattr(hf, said, 0), max(experts) + 1))
    return found


def _further_layers(hf: PretrainedConfig) -> range:
    """The numbers of the layers for multi-token prediction, after those of the model."""
    count = getattr(hf, "num_nextn_predict_layers", None) or 0
    return range(hf.num_hidden_layers, hf.num_hidden_layers + count)


def _check_tied(checkpoint: Checkpoint, hf: PretrainedConfig) -> None:
    """An output matrix is there exactly where config.json says so; a mere copy may be too."""
    present = "lm_head.weight" in checkpoint.tensors
    if not present and not hf.tie_word_embeddings:
        raise UserError(
            f"{checkpoint.directory}: config.json says tie_word_embeddings=False but the weights "
            "have no lm_head.weight, as if it were True; correct config.json or fetch the missing "
            "file"
        )
    if present and hf.tie_word_embeddings:
        shape = (hf.vocab_size, hf.hidden_size)
        embedding, output = (
            checkpoint.stored(n, shape) for n in ("model.embed_tokens.weight", "lm_head.weight")
        )
        parts = [slice(at, at + _COMPARED_ROWS) for at in range(0, shape[0], _COMPARED_ROWS)]
        if not all(torch.equal(embedding[part], output[part]) for part in parts):
            raise UserError(
                f"{checkpoint.directory}: config.json says tie_word_embeddings=True but the "
                "weights have an lm_head.weight of its own, as if it were False; correct "
                "config.json"
            )


def _check_rope(checkpoint: Checkpoint, hf: PretrainedConfig) -> None:
    """Old checkpoints carry the inverse frequencies theta^(-2i/d), from which theta follows."""
    name = next((name for name in checkpoint.tensors if name.endswith(_DERIVED)), None)
    if name is None or hf.rope_parameters.get("rope_type", "default") != "default":
        return
    stored = checkpoint.read(name, checkpoint.tensors[name].info.shape).double()
    said, count = float(hf.rope_parameters["rope_theta"]), stored.numel()
    if not torch.allclose(
        stored, said ** (-torch.arange(count, dtype=torch.float64) / count), rtol=0.01, atol=0
    ):
        found = float(stored[-1]) ** (-count / max(count - 1, 1))
        raise UserError(
            f"{checkpoint.directory}: config.json says rope_theta={said:g} but the weights' {name} "
            f"was made with {found:.4g}; correct config.json"
        )
