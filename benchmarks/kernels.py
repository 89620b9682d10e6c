#!/usr/bin/env python
"""The Triton kernels compiled for GPUs that need not be there: registers, spilled bytes and shared
memory of every variant, by Triton's own ptxas.

    .venv/bin/python benchmarks/kernels.py            # the table
    .venv/bin/python benchmarks/kernels.py --write    # and into docs/tuning.md

A variant is what a launch fixes: of the head's kernels the logits' dtype, whether rows have a
temperature of their own, and whether the larger form is asked for (statistics: the collision terms;
gradient: that of the entropy); the hash of weights has one. Pointers and strides are taken for
multiples of 16, as the head's are. More than 255 registers a thread do not exist: what does not fit
is spilled to memory, and nothing should be.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PAGE = ROOT / "docs" / "tuning.md"
MARKS = ("<!-- kernels -->", "<!-- end of kernels -->")
ARCHITECTURES = (80, 90, 100)  # A100, H100, B200
DTYPES = ("bf16", "fp32")
COLUMNS = 152064 // 8  # of a tile: Qwen2.5's vocabulary over eight ranks


@dataclass(frozen=True, order=True)
class Variant:
    kernel: str  # statistics | gradient | hash
    dtype: str
    tempered: bool = False
    larger: bool = False

    @property
    def name(self) -> str:
        larger = {"statistics": "collision", "gradient": "entropy"}.get(self.kernel, "")
        words = [self.dtype, *["tempered"] * self.tempered, *[larger] * self.larger]
        return f"{self.kernel}: {', '.join(words)}"


@dataclass(frozen=True)
class Usage:
    """Registers and spilled bytes of a thread; shared memory of a block [bytes]."""

    registers: int
    spilled: int
    shared: int


VARIANTS = [
    Variant(*values)
    for values in itertools.product(
        ("statistics", "gradient"), DTYPES, (False, True), (False, True)
    )
] + [Variant("hash", "i32")]


def usage(variant: Variant, architecture: int) -> Usage:
    """The resources that ptxas gives the variant on compute capability `architecture` / 10."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
    from triton.compiler import ASTSource

    function, constants, types = _signature(variant)
    names = list(function.arg_names)
    aligned = [place for place, name in enumerate(names) if types[name].startswith("*")]
    aligned += [names.index(name) for name in ("column_count", "row_stride") if name in names]
    source = ASTSource(
        fn=function,
        signature=types,
        constexprs=constants,
        attrs={(place,): [["tt.divisibility", 16]] for place in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "kernel.ptx"
        text.write_text(compiled.asm["ptx"])
        name = f"--gpu-name={sm_arch_from_capability(architecture)}"
        command = [get_ptxas(architecture).path, "-v", name, str(text), "-o", f"{text}.cubin"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    registers = re.search(r"Used (\d+) registers", said)
    if found is None or registers is None:
        raise RuntimeError(f"ptxas says neither registers nor spills: {said}")
    return Usage(int(registers[1]), int(found[1]) + int(found[2]), compiled.metadata.shared)


def _signature(variant: Variant) -> tuple[Any, dict[str, Any], dict[str, str]]:
    """The kernel, its constants and the types of its other arguments."""
    from megatron_stare.numerics import hash_kernel, hashes, vocab_kernels

    if variant.kernel == "hash":
        types = {"word_pointer": "*i32", "value_pointer": "*i64", "word_count": "i32"}
        function = hash_kernel._tile_kernel
        fixed = [name for name in function.arg_names if name.isupper()]
        values = [*hashes.HALVES[0], *hashes.HALVES[1], hashes.TILE]
        constants = dict(zip(fixed, values, strict=True))
        return function, constants, types | {"size": "i64"} | dict.fromkeys(fixed, "constexpr")
    types = {"target_pointer": "*i64", "tile_pointer": f"*{variant.dtype}"}
    types |= dict.fromkeys(("first_column", "column_count", "row_stride"), "i32")
    constants: dict[str, Any] = {"TEMPERED": variant.tempered}
    if variant.kernel == "statistics":
        function, block = vocab_kernels._statistics_kernel, vocab_kernels.STATISTICS_BLOCK
        constants |= {"FIELD_COUNT": 6 if variant.larger else 4, "COLLISION": variant.larger}
        constants |= {"BLOCK_COUNT": -(-COLUMNS // block), "BLOCK": block}
    else:
        function, block = vocab_kernels._gradient_kernel, vocab_kernels.GRADIENT_BLOCK
        constants |= {"ENTROPY": variant.larger, "BLOCK": block}
    names = list(function.arg_names)
    if not variant.tempered:  # the kernel is given some other row's pointer, and reads none
        types["inverse_temperature_pointer"] = "*i64" if variant.kernel == "statistics" else "*fp32"
    kinds = {name: types.get(name, "*fp32") for name in names}
    return function, constants, kinds | dict.fromkeys(constants, "constexpr")


def rows(
    variants: Iterable[Variant] = VARIANTS, architectures: Iterable[int] = ARCHITECTURES
) -> list[str]:
    """One line of the table for each variant: registers / spilled / shared on each GPU."""
    found = []
    for variant in variants:
        each = [usage(variant, architecture) for architecture in architectures]
        cells = [f"{one.registers} / {one.spilled} / {one.shared:,}" for one in each]
        found.append(f"| {' | '.join([variant.name, *cells])} |")
    return found


def table() -> str:
    """All of it, as it stands in the page."""
    import triton

    head = [f"Triton {triton.__version__}", *(f"sm_{name}" for name in ARCHITECTURES)]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *rows()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the table into docs/tuning.md")
    made = table()
    if parser.parse_args().write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        text = f"{before}{MARKS[0]}\n\n{made}\n\n{MARKS[1]}{after}"
        PAGE.write_text(text, encoding="utf-8")
    print(made)


if __name__ == "__main__":
    main()
