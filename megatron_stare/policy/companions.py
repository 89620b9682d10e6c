"""The files of a Hugging Face directory that belong to no weight: tokenizer, chat template, generation defaults."""

from __future__ import annotations

import shutil
from pathlib import Path

COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)


def copy_companions(source: Path, target: Path) -> None:
    """Copy to `target` those of COMPANIONS that `source` has, as they are."""
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copy2(source / name, target / name)
