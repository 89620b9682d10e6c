"""`quantize`: writes a quantised copy of a checkpoint for rollout servers and measures the error
that quantisation makes.

A quantised rollout policy samples from another distribution than the one being trained: it is
off-policy, and the size of the error decides whether it can be used. So the error is measured on
the exported files, read back and decoded. Memory at the peak: two models in the source's dtype, the
original and the decoded one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy
from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError
from transformers import PretrainedConfig, PreTrainedModel

from megatron_stare.config import Config, UserError, differences, override
from megatron_stare.data.prompts import load_prompts
from megatron_stare.loop.resolve import load_tokenizer
from megatron_stare.policy import quantization
from megatron_stare.policy.huggingface.files import copy_companions, new_directory
from megatron_stare.policy.quantization import (
    QuantizationError,
    load_exported,
    measure,
    quantize_blocks,
)
from megatron_stare.system import atomic_directory

RECORD_NAME = "quantization.json"


@dataclass(frozen=True)
class QuantizeOptions:
    """The command's arguments. `overrides` may set fields of `data`,
    which say how the calibration file is read.
    """

    source: Path
    target: Path
    calibration: str
    format: str = "fp8"
    samples: int = 512  # prompts to calibrate on
    held_out: int = 64  # other prompts to measure on
    response_tokens: int = 0  # sampled after every prompt by the original
    seed: int = 0
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Split:
    """Token sequences to calibrate and to measure on;
    `held_out` is False where these are the same.
    """

    calibration: list[list[int]]
    measuring: list[list[int]]
    held_out: bool


def quantize(options: QuantizeOptions) -> QuantizationError:
    """Write options.target, print and record the error.
    UserError for whatever the user has to fix.
    """
    target, hf = new_directory(options.target), _check(options)
    split = _split(_prompts(options, hf), options)
    by_modelopt = bool(quantization.find_format(options.format).preset)
    version = str(quantization.require_modelopt().__version__) if by_modelopt else ""
    with _appearing(target) as directory:
        model = quantization.load_model(options.source)
        if options.response_tokens:
            split = _with_responses(split, model, options)
        if by_modelopt:
            model = quantization.quantize_model(model, options.format, split.calibration)
            quantization.export_model(model, options.source, directory)
        else:
            quantize_blocks(options.source, directory, hf, options.format)
        del model
        copy_companions(options.source, directory)
        read_back = load_exported(directory)
        error = measure(quantization.load_model(options.source), read_back, split.measuring)
        record = _record(options, split, version, error)
        (directory / RECORD_NAME).write_text(json.dumps(record, indent=2) + "\n")
    _print(options, split, error)
    return error


def _check(options: QuantizeOptions) -> PretrainedConfig:
    quantization.find_format(options.format)
    for name, lowest in (("samples", 1), ("held_out", 0), ("response_tokens", 0), ("seed", 0)):
        if getattr(options, name) < lowest:
            flag = name.replace("_", "-")
            value = getattr(options, name)
            raise UserError(f"--{flag} {value} is out of range; it must be at least {lowest}")
    if not Path(options.calibration).is_file():
        raise UserError(
            f"--calibration {options.calibration} does not exist; give a .jsonl or .parquet of "
            "prompts"
        )
    return quantization.check_source(options.source, options.format)


def _prompts(options: QuantizeOptions, hf: PretrainedConfig) -> list[list[int]]:
    """The distinct prompts of the calibration file, in an order that the seed decides."""
    config = override(Config(), options.overrides)
    for key, _, value in differences(Config(), config):
        if not key.startswith("data.") or key == "data.prompt_data":
            raise UserError(
                f"override {key}={value} does not reach quantize; only data.* does, next to "
                "--calibration"
            )
    tokenizer = load_tokenizer(str(options.source))
    prompts, _ = load_prompts(options.calibration, tokenizer, config.data)
    distinct = [
        list(token_ids)
        for token_ids in dict.fromkeys(tuple(prompt.token_ids.tolist()) for prompt in prompts)
        if token_ids
    ]
    longest, highest = max(map(len, distinct), default=0), max(map(max, distinct), default=0)
    if longest + options.response_tokens > hf.max_position_embeddings:
        raise UserError(
            f"a prompt of {longest} tokens and --response-tokens {options.response_tokens} exceed "
            f"max_position_embeddings={hf.max_position_embeddings}; lower "
            "data.rollout_max_prompt_len"
        )
    if highest >= hf.vocab_size:
        raise UserError(
            f"{options.source}: the tokenizer gives id {highest}, over vocab_size={hf.vocab_size}; "
            "take the tokenizer that belongs to the model"
        )
    if longest + options.response_tokens < 2:
        raise UserError(
            f"--calibration {options.calibration}: no prompt has two tokens; give longer prompts"
        )
    order = numpy.random.default_rng(options.seed).permutation(len(distinct))
    return [distinct[number] for number in order]


def _split(prompts: list[list[int]], options: QuantizeOptions) -> Split:
    """At most a quarter of the prompts is held out. Too few for that (under 4):
    the calibration prompts measure too.
    """
    held_out = min(options.held_out, len(prompts) // 4)
    calibration = prompts[held_out:][: options.samples]
    return Split(calibration, prompts[:held_out] or calibration, held_out > 0)


def _with_responses(split: Split, model: PreTrainedModel, options: QuantizeOptions) -> Split:
    """The same prompts, each followed by a response of the original model."""

    def extended(prompts: list[list[int]]) -> list[list[int]]:
        return quantization.sample_responses(model, prompts, options.response_tokens, options.seed)

    calibration = extended(split.calibration)
    return Split(
        calibration, extended(split.measuring) if split.held_out else calibration, split.held_out
    )


@contextlib.contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """`atomic_directory`. UserError: the directory cannot be written."""
    try:
        with atomic_directory(target) as temporary:
            yield temporary
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno is None:
            raise  # transformers', about something else
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{target} cannot be written ({reason}); give another target") from None


def _record(
    options: QuantizeOptions, split: Split, version: str, error: QuantizationError
) -> dict[str, object]:
    return {
        "format": options.format,
        "modelopt": version,
        "source": str(options.source),
        "calibration": {
            "file": options.calibration,
            "prompts": len(split.calibration),
            "tokens": sum(map(len, split.calibration)),
            "response_tokens": options.response_tokens,
        },
        "measured_on": {
            "prompts": len(split.measuring),
            "tokens": sum(map(len, split.measuring)),
            "held_out": split.held_out,
        },
        "error": dataclasses.asdict(error),
    }


def _print(options: QuantizeOptions, split: Split, error: QuantizationError) -> None:
    title = f"{options.format}, measured on the exported files"
    table = Table("error against the original", "", title=title)
    for label, value in (
        ("KL(original || quantised), mean (nats)", f"{error.kl_mean:.3e}"),
        ("KL, 99th percentile (nats)", f"{error.kl_p99:.3e}"),
        ("KL, maximum (nats)", f"{error.kl_max:.3e}"),
        ("surprisal of the original, mean (nats)", f"{error.surprisal_original:.4f}"),
        ("surprisal shift, mean (nats)", f"{error.surprisal_shift_mean:+.4f}"),
        ("surprisal shift, mean absolute (nats)", f"{error.surprisal_shift_mean_abs:.4f}"),
        ("same most likely token", f"{error.top1_agreement:.2%}"),
    ):
        table.add_row(label, value)
    console = Console(highlight=False)
    console.print(table)
    which = "the calibration prompts themselves (too few)"
    if split.held_out:
        which = "prompts held out from calibration"
    tokens = sum(map(len, split.calibration))
    console.print(f"calibrated on {len(split.calibration)} prompts, {tokens} tokens")
    console.print(f"measured on {len(split.measuring)} {which}, {error.positions} positions")
    console.print(f"served by: {quantization.FORMATS[options.format].serving}")
    console.print(f"written: {options.target}", soft_wrap=True)
