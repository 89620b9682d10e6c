"""The commands that convert, download, quantize and serve models."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from megatron_stare.commands.arguments import OVERRIDES, SOURCE, argument, command
from megatron_stare.recipes import config_of


@command(
    "convert",
    "convert checkpoints between Hugging Face and Megatron, or a GGUF file to Hugging Face",
    argument(
        "direction",
        choices=["hf-to-megatron", "megatron-to-hf", "megatron-to-peft", "gguf-to-hf"],
    ),
    argument(
        "checkpoint", metavar="SOURCE", type=Path, help="a model, a run, a checkpoint, a file"
    ),
    argument("target", metavar="TARGET", type=Path, help="a directory that does not exist yet"),
    argument("--dtype", choices=["fp32", "bf16"], default="", help="default: that of SOURCE"),
    argument("--verify", action="store_true", help="compare every byte and both models' logits"),
    argument("--prompts", default="", help="with --verify: a text file, one prompt per line"),
    argument(
        "--base",
        type=Path,
        help="of adapters: their base model, if it has moved; of Qwen3.5: the published model",
    ),
    examples=(
        "convert megatron-to-hf runs/mine exported",
        "convert megatron-to-peft runs/lora adapters",
        "convert gguf-to-hf model.gguf models/mine",
    ),
)
def _convert(options: argparse.Namespace) -> int:
    from megatron_stare.commands import convert as convert_command

    return convert_command.run(
        options.direction,
        options.checkpoint,
        options.target,
        options.dtype,
        options.verify,
        options.prompts,
        options.base,
    )


@command(
    "fetch",
    "download a small pretrained language model; nothing is installed",
    argument("model", help="smollm2-135m, or a Hugging Face Hub id owner/name"),
    argument("target", type=Path, help="a new directory"),
    argument("--dtype", choices=["fp32", "bf16"], default="bf16", help="of its weights (bf16)"),
    examples=("fetch smollm2-135m models/smollm2", "fetch Qwen/Qwen3-0.6B models/qwen3"),
)
def _fetch(options: argparse.Namespace) -> int:
    from megatron_stare.commands.fetch import fetch

    return fetch(options.model, options.target, options.dtype)


@command(
    "quantize",
    "quantize a checkpoint for rollout servers and measure the error",
    argument("source", type=Path, help="a Hugging Face model directory"),
    argument("target", type=Path, help="a new directory"),
    OVERRIDES,
    argument("--calibration", required=True, metavar="FILE", help=".jsonl or .parquet of prompts"),
    argument("--format", default="fp8", help="fp8 (default), int8, nvfp4 or fp8_experts"),
    argument("--samples", type=int, default=512, help="prompts to calibrate on (512)"),
    argument("--held-out", type=int, default=64, help="other prompts to measure on (64)"),
    argument("--response-tokens", type=int, default=0, help="tokens sampled for each prompt (0)"),
    argument("--seed", type=int, default=0, help="seed of prompt order and responses (0)"),
    examples=(
        "quantize models/A models/A-FP8 --calibration a.jsonl",
        "quantize models/A models/A-INT8 --calibration a.jsonl --format int8",
    ),
)
def _quantize(options: argparse.Namespace) -> int:
    from megatron_stare.commands.quantize import QuantizeOptions, quantize

    given = {each.name: getattr(options, each.name) for each in dataclasses.fields(QuantizeOptions)}
    quantize(QuantizeOptions(**given | {"overrides": tuple(options.overrides)}))
    return 0


@command(
    "serve",
    "start SGLang servers for sglang.urls of other runs, until Ctrl-C",
    SOURCE,
    OVERRIDES,
    examples=("serve short_cot_7b", "serve short_cot_7b sglang.port=30000"),
)
def _serve(options: argparse.Namespace) -> int:
    config = config_of(options.source, options.overrides)
    from megatron_stare.commands.plan import share_memory
    from megatron_stare.commands.servers import serve
    from megatron_stare.loop.interrupt import Interrupt

    with Interrupt(exits=True) as interrupt:
        share_memory(config)
        serve(config, interrupt)
    return 0


@command(
    "relay",
    "receive weights near servers on a slow link (sglang.sync_method=delta)",
    argument("directory", type=Path, help="a directory of its own that the servers can read"),
    argument("--host", default="127.0.0.1", help="interface to listen on (127.0.0.1)"),
    argument("--port", type=int, default=31000, help="port to listen on (31000); 0: any free one"),
    examples=("relay /shared/relay", "relay /shared/relay --host 0.0.0.0 --port 31000"),
)
def _relay(options: argparse.Namespace) -> int:
    from megatron_stare.commands.servers import relay
    from megatron_stare.loop.interrupt import Interrupt

    with Interrupt(exits=True) as interrupt:
        relay(options.directory, options.host, options.port, interrupt)
    return 0
