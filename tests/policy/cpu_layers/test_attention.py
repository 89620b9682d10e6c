"""Packed and padded attention against a naive float64 one: values, gradients, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_stare.policy.cpu_layers.spans import SHORT
from tests.policy.cpu_layers.attention_cases import (
    EXACT,
    MIXED,
    PACKS,
    SHARED,
    core,
    error,
    naive,
    naive_packed,
    naive_padded,
    naive_shared,
    packed_params,
    random_qkv,
    starts_of,
    with_gradients,
)


def packed_error(
    lengths: list[int], heads: int, groups: int, width: int, dtype: Any, device: str = "cpu"
) -> float:
    inputs = [x.to(dtype).double() for x in random_qkv((sum(lengths),), heads, groups, width)]
    attention, params = core(width), packed_params(starts_of(lengths), device=device)
    found = with_gradients(
        lambda *qkv: attention(*qkv, packed_seq_params=params),
        [x.to(device, dtype) for x in inputs],
    )
    return error([x.cpu() for x in found], with_gradients(naive_packed(lengths), inputs))


def padded_error(
    length: int, batch: int, heads: int, groups: int, width: int, dtype: Any, device: str = "cpu"
) -> float:
    inputs = [x.to(dtype).double() for x in random_qkv((length, batch), heads, groups, width)]
    found = with_gradients(core(width), [x.to(device, dtype) for x in inputs])
    return error([x.cpu() for x in found], with_gradients(naive_padded, inputs))


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("length", "batch"), [(1, 3), (37, 1), (50, 7), (SHORT + 1, 3)])
def test_padded_batches_equal_the_twin(length: int, batch: int, groups: int, dtype: Any) -> None:
    assert padded_error(length, batch, 4, groups, 12, dtype) < EXACT[dtype]


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("name", PACKS)
def test_packed_batches_equal_the_twin(name: str, groups: int, dtype: Any) -> None:
    assert packed_error(PACKS[name], 4, groups, 12, dtype) < EXACT[dtype]


def shared_error(groups: int, dtype: Any, device: str = "cpu") -> float:
    lengths, prefixes = SHARED
    inputs = [x.to(dtype).double() for x in random_qkv((sum(lengths),), 4, groups, 12)]
    attention, params = core(12), packed_params(starts_of(lengths), device=device)
    params.prefixes = prefixes
    found = with_gradients(
        lambda *qkv: attention(*qkv, packed_seq_params=params),
        [x.to(device, dtype) for x in inputs],
    )
    return error([x.cpu() for x in found], with_gradients(naive_shared(*SHARED), inputs))


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("groups", [1, 4])
def test_sequences_that_share_rows_equal_the_twin(groups: int, dtype: Any) -> None:
    assert shared_error(groups, dtype) < EXACT[dtype]


def test_bfloat16_statistics_are_fp32() -> None:
    """Rounding of the operands alone: far less than bf16 sums over 300 keys would lose."""
    assert packed_error([301, 40, 41], 4, 2, 16, torch.bfloat16) < 0.02
    assert padded_error(50, 3, 4, 2, 16, torch.bfloat16) < 0.02


def test_the_backward_of_short_spans_is_computed_in_fp32() -> None:
    """Only operands and results are rounded: 0.0056. With products in bf16 the error is 0.0078."""
    assert packed_error([70] * 4, 9, 3, 64, torch.bfloat16) < 0.0065


def test_batch_axis_of_one_and_projection_views() -> None:
    """[T, 1, heads, D] gives [T, 1, H * D];
    values that are views into a fused projection are fine.
    """
    fused_T1X = torch.randn(sum(MIXED), 1, 2, 4 * 12, dtype=torch.float64)
    query, key, value = fused_T1X.split((24, 12, 12), dim=3)
    query = query.reshape(-1, 1, 4, 12)
    found = core(12)(query, key, value, packed_seq_params=packed_params(starts_of(MIXED)))
    assert found.shape == (sum(MIXED), 1, 48)
    torch.testing.assert_close(
        found[:, 0], naive_packed(MIXED)(query[:, 0], key[:, 0], value[:, 0])
    )


def test_padded_offsets_give_the_layout() -> None:
    """Real tokens of sequences in padded slots see their own sequence only,
    whatever stands in the padding.
    """
    lengths, slots = [5, 8, 3], [8, 8, 4]
    padded, params = starts_of(slots), packed_params(starts_of(lengths), starts_of(slots))
    q, k, v, _ = random_qkv((20,), 4, 2, 8)
    found = core(8)(q, k, v, packed_seq_params=params)
    for start, length in zip(padded, lengths, strict=False):
        own = slice(start, start + length)
        torch.testing.assert_close(found[own], naive(q[own], k[own], v[own]))


def test_offsets_changed_in_place_are_read_again() -> None:
    q, k, v, _ = random_qkv((20,), 2, 2, 8)
    attention, params = core(8), packed_params([0, 5, 20])
    attention(q, k, v, packed_seq_params=params)
    params.cu_seqlens_q[1] = 11
    torch.testing.assert_close(
        attention(q, k, v, packed_seq_params=params), naive_packed([11, 9])(q, k, v)
    )


def test_attention_repeats_its_bits() -> None:
    inputs, attention = random_qkv((sum(MIXED),), 4, 2, 12), core(12)
    params = packed_params(starts_of(MIXED))
    runs = [
        with_gradients(lambda *qkv: attention(*qkv, packed_seq_params=params), inputs)
        for _ in range(2)
    ]
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"attention_type": "cross"}, "attention_type"),
        ({"attn_mask_type": "padding"}, "attn_mask_type"),
    ],
)
def test_building_refuses_unsupported_arguments(overrides: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        core(8, **overrides)


def refused_calls() -> dict[str, dict[str, Any]]:
    """Arguments that a call refuses, by what its message must say."""
    other_keys = torch.tensor([0, 5, 20])
    return {
        "attention_mask": {"attention_mask": torch.ones(1)},
        "attention_bias": {"attention_bias": torch.ones(1)},
        "qkv_format": {"packed_seq_params": packed_params([0, 4, 20], qkv_format="sbhd")},
        "local_cp_size": {"packed_seq_params": packed_params([0, 4, 20], local_cp_size=2)},
        "20 tokens": {"packed_seq_params": packed_params([0, 4, 19])},
        "rise": {"packed_seq_params": packed_params([0, 4, 2, 20])},
        "cu_seqlens_kv": {"packed_seq_params": packed_params([0, 4, 20], cu_seqlens_kv=other_keys)},
    }


def test_calling_refuses_unsupported_arguments() -> None:
    q, k, v, _ = random_qkv((20,), 2, 2, 8)
    for name, call in refused_calls().items():
        with pytest.raises(ValueError, match=name):
            core(8)(q, k, v, **call)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 0.02), (torch.float16, 0.004), (torch.float32, 2e-5)]
)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_cuda(groups: int, dtype: torch.dtype, tolerance: float) -> None:
    for lengths in PACKS.values():
        assert packed_error(lengths, 4, groups, 32, dtype, "cuda") < tolerance
    assert (
        packed_error(MIXED, 4, groups, 12, dtype, "cuda") < tolerance
    )  # a width that must be padded
    assert shared_error(groups, dtype, "cuda") < tolerance
    assert padded_error(50, 7, 4, groups, 32, dtype, "cuda") < tolerance
    assert padded_error(300, 1, 4, groups, 64, dtype, "cuda") < tolerance
