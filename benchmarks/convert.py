"""Peak memory and time of converting a checkpoint, next to a plain copy of the same bytes.

    OMP_NUM_THREADS=1 python benchmarks/convert.py                 2 GB of bf16, both directions
    OMP_NUM_THREADS=1 python benchmarks/convert.py --layers 28 --rounds 3 --json convert.json

The checkpoint is synthetic: Qwen2.5-1.5B's shape with fewer layers, tied, bf16, in files of at most
1 GB. "peak" is by how much the resident memory (mapped files included) of a conversion rises over
what the process had before it, after a tiny conversion. "copy" copies the source's
files and syncs them to disk, which the conversion does too. Fastest of the rounds; copy and
conversions take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen2Config

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._measuring import PeakMemory, machine
from megatron_stare.config import PolicyConfig
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.conversion import convert
from megatron_stare.policy.huggingface import files as hf_files
from megatron_stare.policy.huggingface.names import name_table

FILE_BYTES = 1 << 30


def make_source(directory: Path, layers: int) -> int:
    """Write the synthetic checkpoint; its bytes."""
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
    )
    config.save_pretrained(directory)
    shapes = {
        name: (shape, torch.bfloat16)
        for entry in name_table(config)
        for name, shape in entry.tensors
    }
    sizes = {name: torch.Size(shape).numel() * 2 for name, (shape, _) in shapes.items()}
    layout = hf_files.default_layout(sizes, FILE_BYTES)
    for file in layout.files:
        own = {name: shapes[name] for name in file.tensors}
        tensors = (torch.randn(shape, dtype=dtype) for shape, dtype in own.values())
        hf_files.write_file(directory / file.name, own, tensors, file.metadata)
    hf_files.write_index(directory, layout, sizes)
    return sum(sizes.values())


def copy(source: Path, target: Path) -> None:
    """Every file, synced to disk."""
    target.mkdir()
    for file in source.iterdir():
        shutil.copyfile(file, target / file.name)
        with (target / file.name).open("rb") as stream:
            os.fsync(stream.fileno())


def measured(action: Callable[[], object]) -> tuple[float, float]:
    """(seconds, MiB by which the resident memory rose at most)."""
    with PeakMemory(torch.device("cpu")) as memory:
        began = time.perf_counter()
        action()
        seconds = time.perf_counter() - began
    return seconds, (memory.bytes or 0) / (1 << 20)


def rounds(source: Path, base: Path, count: int) -> Iterator[dict[str, tuple[float, float]]]:
    """Seconds and MiB of each contender, in turns."""
    with topologies.session(PolicyConfig()) as topology:
        tiny = base / "tiny"
        make_source(tiny, 1)
        convert.hf_to_megatron(tiny, base / "tiny_megatron", topology)
        convert.megatron_to_hf(base / "tiny_megatron", base / "tiny_hf", topology)
        for _ in range(count):
            megatron, back, copied = base / "megatron", base / "hf", base / "copy"
            yield {
                "copy": measured(lambda copied=copied: copy(source, copied)),
                "hf-to-megatron": measured(
                    lambda m=megatron: convert.hf_to_megatron(source, m, topology)
                ),
                "megatron-to-hf": measured(
                    lambda m=megatron, b=back: convert.megatron_to_hf(m, b, topology)
                ),
            }
            for file in source.glob("*.safetensors"):
                assert file.read_bytes() == (back / file.name).read_bytes(), (
                    f"{file.name} came back changed"
                )
            for directory in (megatron, back, copied):
                shutil.rmtree(directory)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=17)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--directory", help="where to write (three times the checkpoint); default: a temporary one"
    )
    parser.add_argument("--json", type=Path, help="write the table and the machine here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        base = Path(folder)
        size = make_source(base / "source", options.layers)
        found = list(rounds(base / "source", base, options.rounds))
    table = Table(
        title=f"{size / 1e9:.2f} GB of bf16, largest tensor {151936 * 1536 * 2 / 1e6:.0f} MB"
    )
    for column in ("", "s", "of the copy", "MB/s", "peak MiB"):
        table.add_column(column, justify="left" if not column else "right")
    fastest = {name: min(one[name] for one in found) for name in found[0]}
    peak = {name: max(one[name][1] for one in found) for name in found[0]}
    rows = {
        name: {
            "seconds": seconds,
            "of_copy": seconds / fastest["copy"][0],
            "mb_per_s": size / seconds / 1e6,
            "mib": peak[name],
        }
        for name, (seconds, _) in fastest.items()
    }
    for name, row in rows.items():
        numbers = (
            f"{row['seconds']:.2f}",
            f"{row['of_copy']:.2f}",
            f"{row['mb_per_s']:.0f}",
            f"{row['mib']:.0f}",
        )
        table.add_row(name, *numbers)
    Console().print(table)
    if options.json:
        content = {"bytes": size, "rows": rows, "machine": machine(torch.device("cpu"))}
        options.json.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
