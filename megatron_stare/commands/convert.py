"""`convert`: one process, a progress bar, and on request the proof that nothing was lost."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from pathlib import Path

from megatron_stare.config import PolicyConfig, UserError
from megatron_stare.loop.resolve import load_tokenizer
from megatron_stare.policy import build, manifest, model_state
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.checkpoints.checkpoints import verify
from megatron_stare.policy.checkpoints.names import BEST, LATEST, listed
from megatron_stare.policy.conversion import convert, verification
from megatron_stare.policy.conversion.gguf import gguf_to_hf
from megatron_stare.policy.conversion.megatron_files import stored_adapters
from megatron_stare.policy.conversion.tiktoken import tiktoken_to_hf
from megatron_stare.policy.huggingface.checkpoint import Checkpoint
from megatron_stare.policy.topology import Topology
from megatron_stare.reporting.live import progress

TO_MEGATRON, TO_HF, OF_GGUF = "hf-to-megatron", "megatron-to-hf", "gguf-to-hf"
TO_PEFT, OF_TIKTOKEN = "megatron-to-peft", "tiktoken-to-hf"
# Texts that --verify runs through both models where --prompts names no file.
PROMPTS = (
    "Find the sum of all positive integers n for which n^2 + 19n + 99 is a perfect square.",
    "Let f(x) = x^3 - 6x^2 + 11x - 6. Factor f and put the largest root in \\boxed{}.",
    "def collatz(n):\n    steps = 0\n    while n != 1:\n        n = n // 2 if n % 2 == 0 else 3 * "
    "n + 1\n",
    "The first-order change of policy entropy is the product of two factors:",
)
_MIB = 1 << 20


def run(
    direction: str,
    source: Path,
    target: Path,
    dtype: str = "",
    verify_it: bool = False,
    prompts: str = "",
    base: Path | None = None,
) -> int:
    """Convert; the exit code: 0, or 1 where --verify found a difference."""
    if base is not None and direction != TO_HF:
        raise UserError(f"--base belongs to {TO_HF} of adapters or of Qwen3.5; leave it out")
    if direction in (OF_GGUF, OF_TIKTOKEN) and verify_it:
        raise UserError(f"--verify compares Megatron checkpoints; {direction} has none")
    if direction == OF_TIKTOKEN:
        if dtype:
            raise UserError(f"--dtype {dtype}: a tokenizer has no weights; leave it out")
        print(f"written: a tokenizer of {tiktoken_to_hf(source, target):,} tokens in {target}")
        return 0
    if direction == OF_GGUF:
        written = gguf_to_hf(source, target, build.DTYPES[dtype or "fp32"])
        print(f"written: {target} ({written / 1e6:,.1f} MB)")
        return 0
    with topologies.session(PolicyConfig()) as topology:
        if topology.world_size > 1:
            raise UserError(
                "convert runs in one process, not under torchrun; any layout loads what it writes"
            )
        source = _source(direction, source)
        _check_damage(source, topology)
        if verify_it and direction != TO_MEGATRON and stored_adapters(source):
            raise UserError(
                f"--verify compares whole checkpoints, and {source} holds adapters; leave it out"
            )
        if direction == TO_PEFT:
            written = convert.megatron_to_peft(source, target, topology, dtype)
            print(f"written: {target} ({written / 1e6:,.1f} MB)")
            return 0
        texts = _texts(source, prompts) if verify_it else []
        with contextlib.ExitStack() as shown:
            bar = functools.partial(_bar, shown, direction)
            if direction == TO_MEGATRON:
                written = convert.hf_to_megatron(source, target, topology, dtype, bar)
            else:
                written = convert.megatron_to_hf(source, target, topology, dtype, bar, base)
        print(f"written: {target} ({written / 1e6:,.1f} MB)")
        if direction == TO_MEGATRON:
            _name_left_out(source)
        return _verify(direction, source, target, topology, texts, dtype) if verify_it else 0


def _bar(shown: contextlib.ExitStack, direction: str, total: int) -> Callable[[int], None]:
    """A progress bar of `total` bytes, counted in MiB, which ends with `shown`."""
    bar, done = shown.enter_context(progress(direction, max(1, -(-total // _MIB)))), 0

    def update(count: int) -> None:
        nonlocal done
        before, done = -(-done // _MIB), done + count
        if -(-done // _MIB) > before:
            bar.update(-(-done // _MIB) - before)

    return update


def _source(direction: str, source: Path) -> Path:
    """The directory to read; for a run or its checkpoints, the latest of them, and for a file that
    names a checkpoint that one.
    """
    pointers = (source, source / "checkpoints" / LATEST, source / LATEST)
    for pointer in () if direction == TO_MEGATRON else pointers:
        if pointer.name in (LATEST, BEST) and pointer.is_file():
            source = pointer.parent / pointer.read_text().partition(" ")[0].strip()
            break
    if not source.is_dir():
        there = ", ".join(path.name for path in listed(source.parent))
        others = f"; there are {there}" if there else ""
        raise UserError(
            f"SOURCE {source} is not a directory; give a checkpoint's directory{others}"
        )
    if direction == TO_MEGATRON:
        if model_state.is_distributed(source):
            raise UserError(f"SOURCE {source} is a Megatron checkpoint already; use megatron-to-hf")
        return source
    if not model_state.is_distributed(source):
        raise UserError(
            f"SOURCE {source} is not a distributed checkpoint of Megatron's (metadata.json and "
            ".metadata); give a run directory, one of its checkpoints, or what hf-to-megatron wrote"
        )
    if not (source / "config.json").is_file():
        raise UserError(
            f"SOURCE {source} has no config.json; copy the Hugging Face model's config and "
            "tokenizer to it"
        )
    return source


def _check_damage(source: Path, topology: Topology) -> None:
    if (source / manifest.NAME).is_file():
        for damage in verify(source, topology):
            raise UserError(
                f"SOURCE {source} is damaged: {damage}; restore it or take another checkpoint "
                f"(if the change is yours, remove {manifest.NAME})"
            )


def _texts(source: Path, prompts: str) -> list[list[int]]:
    """The prompts to compare logits on, as token ids."""
    lines = list(PROMPTS)
    if prompts:
        try:
            text = Path(prompts).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"--prompts {prompts}: {error}; give a text file in UTF-8, one prompt a line"
            ) from None
        lines = [line for line in text.splitlines() if line.strip()]
        if not lines:
            raise UserError(f"--prompts {prompts} is empty; give a text file, one prompt a line")
    tokenizer = load_tokenizer(str(source))
    texts = [tokenizer.encode(line) for line in lines]
    vocabulary = build.read_hf_config(str(source)).vocab_size
    largest = max((each for ids in texts for each in ids), default=0)
    if largest >= vocabulary:
        raise UserError(
            f"{source}: its tokenizer gives the id {largest}, and config.json says vocab_size="
            f"{vocabulary}; take the tokenizer of this model, or leave --verify out"
        )
    return texts


def _name_left_out(source: Path) -> None:
    """Say what the trainer has no place for, so that a conversion back lacks it."""
    names = Checkpoint(str(source)).further(build.read_hf_config(str(source)))
    if names:
        print(
            f"left out: {len(names)} tensors of layers that predict further tokens "
            f"(num_nextn_predict_layers), {names[0]} first; they are not trained, and a "
            "conversion back to Hugging Face does not have them"
        )


def _verify(
    direction: str,
    source: Path,
    target: Path,
    topology: Topology,
    texts: list[list[int]],
    dtype: str,
) -> int:
    hf, megatron = (source, target) if direction == TO_MEGATRON else (target, source)
    compared, different = verification.compare_tensors(
        hf, megatron, topology, lossy_is_hf=direction == TO_HF
    )
    logits = verification.compare_logits(hf, megatron, topology, texts, build.DTYPES.get(dtype))
    print(f"tensors: {compared - len(different)} of {compared} byte-identical after the round trip")
    print(
        f"logits: {logits.positions} positions of {len(texts)} prompts, largest difference "
        f"{logits.difference:.2e} among values up to {logits.scale:.3g}; the same first choice at "
        f"{logits.agreement:.2%}"
    )
    if different or not logits.close:
        print(
            f"error: the checkpoints differ ({', '.join(different[:3]) or 'logits'})",
            file=sys.stderr,
        )
        return 1
    return 0
