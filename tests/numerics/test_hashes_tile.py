"""The hash of a server on a GPU: against one in plain integers, and its kernel against torch's."""

from __future__ import annotations

import pytest
import torch

from megatron_stare.numerics import hashes
from tests.numerics.interpreted import interpreted

COUNTS = [1, 3, 8192, 8193, 20_001]
DTYPES = [torch.float32, torch.bfloat16]


def hash_of(tensor: torch.Tensor) -> str:
    return hashes.tile_text(int(hashes.tile_total(tensor)))


def sample(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)


def naive_hash(data: bytes) -> str:
    """The hash in plain Python integers, word by word."""
    mask = 0xFFFFFFFF

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x85EBCA6B & mask
        x ^= x >> 13
        x = x * 0xC2B2AE35 & mask
        return x ^ x >> 16

    data += bytes(-len(data) % 4)
    words = [int.from_bytes(data[n : n + 4], "little") for n in range(0, len(data), 4)]
    seeds = (0x243F6A88, ((0x243F6A88 * 0x9E3779B1) ^ 0xDEADBEEF) & mask)
    total = 0
    for start in range(0, len(words), 8192):
        sums = [0, 0]
        for place, word in enumerate(words[start : start + 8192], start=start):
            for half, (factor, turn) in enumerate(((0x27D4EB2D, 15), (0x165667B1, 13))):
                turned = (place << turn | place >> 32 - turn) & mask
                sums[half] += mix(word ^ ((place * factor + seeds[half]) & mask) ^ turned)
        high, low = (mix((value & mask) ^ len(data)) for value in sums)
        total += high << 32 | low
    wide = (1 << 64) - 1
    total &= wide
    total = ((total ^ total >> 30) * 0xBF58476D1CE4E5B9) & wide
    total = ((total ^ total >> 27) * 0x94D049BB133111EB) & wide
    return f"{total ^ total >> 31:016x}"


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_hash_equals_a_naive_one(count: int, dtype: torch.dtype) -> None:
    tensor = sample(count, dtype)
    assert hash_of(tensor) == naive_hash(tensor.view(torch.uint8).numpy().tobytes())


def test_the_hash_equals_that_of_sglangs_kernel() -> None:
    """Values of SGLang 0.5.23's Triton kernel,
    run by Triton's interpreter on torch.randn after manual_seed(0).
    """
    torch.manual_seed(0)
    one, two = torch.randn(3, 5003), torch.randn(77, 301).bfloat16()
    assert [hash_of(one), hash_of(two), hash_of(two[0])] == [
        "a279930f5f4029c7",
        "cf42c605592b7764",
        "def587908710ea87",
    ]


def test_the_hash_does_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = sample(20_001, torch.float32)
    whole = hash_of(tensor)
    monkeypatch.setattr(hashes, "_CHUNK_WORDS", hashes.TILE)
    assert hash_of(tensor) == whole


def test_an_empty_tensor_has_the_empty_hash() -> None:
    assert hash_of(torch.empty(0)) == "0" * 16


def compare_kernel_with_torch(device: str) -> int:
    """The kernel's values of every tile against torch's; returns the number of tensors."""
    from megatron_stare.numerics.hash_kernel import tile_values

    compared = 0
    for count in COUNTS:
        for dtype in DTYPES:
            words = hashes._words(sample(count, dtype))
            wanted = hashes._tile_values(words, 0, words.numel() * 4)
            found = tile_values(words.to(device), hashes.TILE, *hashes.HALVES)
            assert found.tolist() == wanted.tolist()
            compared += 1
    return compared


def test_the_kernel_equals_torch_in_the_interpreter() -> None:
    assert interpreted(__name__, "compare_kernel_with_torch") == "10"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_the_kernel_equals_torch_on_a_gpu() -> None:
    assert compare_kernel_with_torch("cuda") == 10
    assert hash_of(sample(20_001, torch.bfloat16).cuda()) == hash_of(sample(20_001, torch.bfloat16))
