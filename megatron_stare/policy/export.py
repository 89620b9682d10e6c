"""Write the policy as a Hugging Face directory that transformers and SGLang load."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import save_file

from megatron_stare.policy import hf_files
from megatron_stare.policy.actor import Actor


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
    source = Path(actor.config.policy.hf_checkpoint)
    for name in hf_files.COMPANIONS:
        if (source / name).is_file():
            shutil.copy2(source / name, temporary / name)
    shutil.rmtree(directory, ignore_errors=True)
    temporary.rename(directory)
