"""Write the policy as a Hugging Face directory that transformers and SGLang load."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import save_file

from megatron_stare.policy.actor import Actor

_COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


def export_hf(actor: Actor, directory: Path) -> None:
    """Weights in one safetensors file beside the source checkpoint's config and tokenizer files. Collective.

    The directory appears whole: it is written under a temporary name and renamed.
    """
    tensors = {name: tensor.clone().contiguous().cpu() for name, tensor in actor.weights()}
    if not actor.topology.is_first:
        return
    temporary = directory.with_name(f".{directory.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
    copy_companions(Path(actor.config.policy.hf_checkpoint), temporary)
    shutil.rmtree(directory, ignore_errors=True)
    temporary.rename(directory)


def copy_companions(source: Path, target: Path) -> None:
    """The config and tokenizer files of an HF directory, as far as it has them."""
    for name in _COMPANIONS:
        if (source / name).is_file():
            shutil.copy2(source / name, target / name)
