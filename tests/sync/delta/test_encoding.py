"""Deltas of tensors: what comes out is what went in, bit by bit, and nothing else is taken."""

from __future__ import annotations

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stare.sync.delta.encoding import (
    MOST_FOR_GAPS,
    Damaged,
    Words,
    apply,
    digest,
    encode,
    words_in,
    words_of,
)

KINDS = {torch.bfloat16: 2, torch.float16: 2, torch.float32: 4, torch.float64: 8}


@st.composite
def versions(draw: st.DrawFn) -> tuple[Words, Words]:
    """Any bits, and others: neighbours, or anything, at a share of the places."""
    kind = draw(st.sampled_from([numpy.uint8, numpy.uint16, numpy.uint32, numpy.uint64]))
    size, share = draw(st.integers(0, 3000)), draw(st.sampled_from([0.0, 1e-3, 0.05, 0.3, 1.0]))
    random = numpy.random.default_rng(draw(st.integers(0, 1 << 32)))
    old = random.integers(0, numpy.iinfo(kind).max, size, kind, endpoint=True)
    moved = random.random(size) < share
    if draw(st.booleans()):
        return old, numpy.where(moved, old ^ kind(1), old)
    return old, numpy.where(moved, random.permutation(old), old)


@settings(max_examples=150, deadline=None)
@given(versions(), st.data())
def test_changed_words_survive_encoding_and_damage_is_found(
    pair: tuple[Words, Words], data: st.DataObject
) -> None:
    old, new = pair
    coding, payload, changed = encode(old, new)
    assert changed == numpy.count_nonzero(old != new)
    assert len(payload) <= new.nbytes and (coding == "same") == (changed == 0)
    made = old.copy()
    apply(coding, memoryview(payload), made)
    assert made.tobytes() == new.tobytes()
    if not payload:
        return
    cut = data.draw(st.integers(0, len(payload) - 1))
    for damaged in (payload[:cut], payload + b"\0"):
        untouched = old.copy()
        with pytest.raises(Damaged):
            apply(coding, damaged, untouched)
        assert untouched.tobytes() == old.tobytes()
    flipped = bytearray(payload)
    flipped[cut] ^= 1 << data.draw(st.integers(0, 7))
    made = old.copy()
    try:
        apply(coding, bytes(flipped), made)
    except Damaged:
        assert made.tobytes() == old.tobytes()
    else:
        assert digest(made) != digest(new) or made.tobytes() == new.tobytes()


@pytest.mark.parametrize("dtype", KINDS)
def test_zeros_of_both_signs_and_nans_of_any_payload(dtype: torch.dtype) -> None:
    special = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1.0], dtype=dtype)
    old, new = words_of(special), words_of(special.flip(0)).copy()
    new[1] |= 1  # another NaN
    assert old.itemsize == KINDS[dtype]
    coding, payload, changed = encode(old, new)
    made = old.copy()
    apply(coding, payload, made)
    assert made.tobytes() == new.tobytes() and changed == 4
    zeros = words_of(torch.zeros(3, dtype=dtype))
    assert encode(zeros, words_of(-torch.zeros(3, dtype=dtype))).changed == 3


def test_words_are_those_of_a_tensor_however_it_lies() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).to(torch.bfloat16)
    assert words_of(tensor.t()).tobytes() == words_of(tensor.t().contiguous()).tobytes()
    assert len(words_of(torch.zeros(0))) == 0 and len(words_of(torch.tensor(1.0))) == 1
    with pytest.raises(Damaged, match="no words"):
        words_in(b"abc", 2)


@pytest.mark.parametrize("share", [0.002, 0.02, 0.1, 0.3, 0.9])
def test_a_training_step_takes_few_bytes(share: float) -> None:
    """Neighbours at a share p of the places: nothing can take fewer bits than the entropy of p and
    one bit for each change. Ours takes less than twice that, and a head.
    """
    random = numpy.random.default_rng(0)
    old = words_of(torch.randn(1 << 18, generator=torch.Generator().manual_seed(0)).bfloat16())
    new = old.copy()
    moved = random.random(len(old)) < share
    new[moved] += random.choice(numpy.array([1, 0xFFFF], numpy.uint16), int(moved.sum()))
    coding, payload, _ = encode(old, new)
    assert coding == ("gaps" if share < MOST_FOR_GAPS else "mask")
    entropy = -share * numpy.log2(share) - (1 - share) * numpy.log2(1 - share) + share
    assert len(payload) * 8 < 2 * entropy * len(old) + 1024


@pytest.mark.parametrize(
    ("coding", "payload"),
    [
        ("same", b"x"),
        ("full", b"123"),
        ("gaps", b""),
        ("zip", b""),
        ("gaps", bytes(17)),
        ("mask", (1 << 40).to_bytes(8, "little") + bytes(9)),
    ],
)
def test_invalid_blocks_are_refused(coding: str, payload: bytes) -> None:
    with pytest.raises(Damaged):
        apply(coding, payload, numpy.zeros(4, numpy.uint16))
