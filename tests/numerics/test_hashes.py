"""The hash of weights: against whole-number arithmetic, whatever the chunks, and for any change."""

import pytest
import torch

from megatron_stare.numerics.hashes import bit_hash
from tests import reference

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn)


def numbers(count: int, dtype: torch.dtype, seed: int = 3) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_hash_equals_integer_arithmetic(dtype):
    tensor = numbers(1003, dtype)
    words = tensor.view(INTEGERS[tensor.element_size()]).tolist()
    assert bit_hash(tensor).item() == reference.bit_hash(words)


@pytest.mark.parametrize("chunk", [1, 7, 64, 1003, 1 << 20])
@pytest.mark.parametrize("shape", [(1003,), (17, 59)])
def test_the_hash_does_not_depend_on_the_chunks(chunk, shape):
    tensor = numbers(1003, torch.bfloat16).reshape(shape)
    assert bit_hash(tensor, chunk) == bit_hash(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_changed_weight_changes_the_hash(dtype):
    tensor = numbers(500, dtype)
    seen = {bit_hash(tensor).item()}
    for place in range(500):
        changed = tensor.clone()
        changed[place] = torch.nextafter(changed[place], changed.new_tensor(9.0))
        seen.add(bit_hash(changed, 64).item())
    assert len(seen) == 501


def test_the_hash_depends_on_positions_and_length():
    tensor = numbers(40, torch.float32)
    swapped = tensor.clone()
    swapped[[3, 30]] = tensor[[30, 3]]
    one_more = torch.cat([tensor, torch.zeros(1)])
    hashes = {bit_hash(one).item() for one in (tensor, swapped, one_more, tensor[:-1], -tensor)}
    assert len(hashes) == 5
    assert bit_hash(torch.zeros(0)).item() == 0


def test_the_hash_is_of_the_visible_tensor():
    tensor = numbers(600, torch.float32).reshape(20, 30)
    assert bit_hash(tensor.T) == bit_hash(tensor.T.contiguous()) != bit_hash(tensor)
    assert bit_hash(tensor[:, 3:7], 16) == bit_hash(tensor[:, 3:7].clone())
    untouched = tensor.clone()
    bit_hash(tensor)
    assert torch.equal(tensor, untouched)


@pytest.mark.gpu
def test_a_gpu_computes_the_same_hash():
    tensor = numbers(5_000_001, torch.bfloat16)
    assert bit_hash(tensor.cuda()).item() == bit_hash(tensor).item()
