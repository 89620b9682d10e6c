"""Write the policy as a Hugging Face directory that transformers and SGLang load."""

from __future__ import annotations

import shutil
from pathlib import Path

from megatron_stare.policy.actor import Actor
from megatron_stare.policy.huggingface import files as hf_files


def export_hf(actor: Actor, directory: Path) -> None:
    """Weights in one safetensors file beside the source checkpoint's config and tokenizer files.
    Collective.

    The directory appears whole: it is written under a temporary name and renamed. Rank 0 holds all
    weights meanwhile; `convert megatron-to-hf` writes a checkpoint's without.
    """
    tensors = {name: tensor.clone().contiguous().cpu() for name, tensor in actor.weights()}
    if not actor.topology.is_first:
        return
    temporary = directory.with_name(f".{directory.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    names = tuple(sorted(tensors))
    infos = hf_files.describe(
        {name: (tuple(tensors[name].shape), tensors[name].dtype) for name in names}, names
    )
    ordered = (tensors[name] for name in names)
    hf_files.write_file(temporary / hf_files.SINGLE, ordered, infos, {"format": "pt"})
    source = Path(actor.config.policy.hf_checkpoint)
    shutil.copyfile(source / "config.json", temporary / "config.json")
    hf_files.copy_companions(source, temporary)
    shutil.rmtree(directory, ignore_errors=True)
    temporary.rename(directory)
