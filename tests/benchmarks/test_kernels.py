"""The Triton kernels compile for GPUs of three generations, and nothing of them is spilled."""

from __future__ import annotations

import pytest

from benchmarks.kernels import ARCHITECTURES, MARKS, PAGE, VARIANTS, Variant, rows, table, usage

# The statistics and the gradient that hold most, and the hash.
HEAVIEST = [
    Variant("statistics", "bf16", True, True),
    Variant("gradient", "bf16", True, True),
    Variant("hash", "i32"),
]


def recorded() -> list[str]:
    text = PAGE.read_text(encoding="utf-8")
    return text.split(MARKS[0])[1].split(MARKS[1])[0].strip().splitlines()


def test_the_heaviest_variants_are_as_recorded() -> None:
    """Else: .venv/bin/python benchmarks/kernels.py --write"""
    for variant in HEAVIEST:
        assert rows([variant])[0] in recorded()


def test_the_record_has_no_spills() -> None:
    lines = recorded()[2:]
    assert len(lines) == len(VARIANTS) == 17
    for line in lines:
        for cell in line.strip("| ").split(" | ")[1:]:
            registers, spilled, shared = (int(part.replace(",", "")) for part in cell.split(" / "))
            assert 0 < registers <= 255 and spilled == 0 and shared <= 48 << 10


def test_a_spill_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One warp for a block of 4096 columns needs more registers than a thread has."""
    import triton

    plain = triton.compile
    monkeypatch.setattr(
        triton, "compile", lambda source, target: plain(source, target, options={"num_warps": 1})
    )
    assert usage(HEAVIEST[0], ARCHITECTURES[1]).spilled > 0


@pytest.mark.slow
def test_the_record_is_whole_and_up_to_date() -> None:
    assert table().splitlines() == recorded()
