"""What a server must report of the weights it was sent: buckets, hashes, fused tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_stare.rollout.sglang.weights import (
    Expected,
    Layout,
    WeightMismatch,
    buckets,
    cpu_hash,
    gpu_hash,
)


def test_buckets_hold_the_stream_in_order_and_mark_the_last():
    stream = [(str(n), torch.zeros(n + 1)) for n in range(9)]
    parts = list(buckets(iter(stream), 40))
    assert [name for part, _ in parts for name, _ in part] == [name for name, _ in stream]
    assert [last for _, last in parts] == [False] * (len(parts) - 1) + [True]
    assert all(
        len(part) == 1 or sum(tensor.nbytes for _, tensor in part) <= 40 for part, _ in parts
    )
    assert [len(part) for part, _ in parts] == [4, 1, 1, 1, 1, 1]


def naive_gpu_hash(data: bytes) -> str:
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


@pytest.mark.parametrize("count", [1, 3, 8192, 8193, 20_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gpu_hash_equals_a_naive_one(count: int, dtype: torch.dtype):
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)
    assert gpu_hash(tensor) == naive_gpu_hash(tensor.view(torch.uint8).numpy().tobytes())


def test_the_gpu_hash_equals_what_sglangs_own_kernel_computed():
    """Values of SGLang 0.5.23's Triton kernel,
    run by Triton's interpreter on torch.randn after manual_seed(0).
    """
    torch.manual_seed(0)
    one, two = torch.randn(3, 5003), torch.randn(77, 301).bfloat16()
    assert [gpu_hash(one), gpu_hash(two), gpu_hash(two[0])] == [
        "a279930f5f4029c7",
        "cf42c605592b7764",
        "def587908710ea87",
    ]


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (70, 8),
        f"{layer}self_attn.q_proj.weight": (8, 8),
        f"{layer}self_attn.k_proj.weight": (4, 8),
        f"{layer}self_attn.v_proj.weight": (4, 8),
        f"{layer}self_attn.o_proj.weight": (8, 8),
        f"{layer}mlp.gate_proj.weight": (12, 8),
        f"{layer}mlp.up_proj.weight": (12, 8),
        f"{layer}mlp.down_proj.weight": (8, 12),
        "model.norm.weight": (8,),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def answer_of(expected: Expected) -> list[dict[str, Any]]:
    places = [
        {"tp_rank": rank, "tp_size": expected.layout.tensor_size}
        for rank in range(expected.layout.tensor_size)
    ]
    return [
        {"checksums": dict(sums), "parallelism_info": [place]}
        for sums, place in zip(expected.sums, places, strict=True)
    ]


def test_fused_and_split_weights_are_hashed_as_the_ranks_hold_them():
    sent, layer = weights(), "model.layers.0."
    expected = Expected(Layout(2, torch.bfloat16, on_gpu=False), key_value_heads=1)
    for name, tensor in reversed(sent.items()):  # the order of the parts must not matter
        expected.add(name, tensor)
    half = {name: tensor.bfloat16() for name, tensor in sent.items()}
    q, k, v = (half[f"{layer}self_attn.{part}_proj.weight"] for part in "qkv")
    padded = torch.cat([half["model.embed_tokens.weight"], torch.zeros(58, 8).bfloat16()])
    gate, up = (
        torch.cat([half[f"{layer}mlp.{part}_proj.weight"], torch.zeros(52, 8).bfloat16()])
        for part in ("gate", "up")
    )
    for rank in range(2):
        rows, wide, sums = (
            slice(4 * rank, 4 * rank + 4),
            slice(32 * rank, 32 * rank + 32),
            expected.sums[rank],
        )
        # One key-value head for two ranks: both hold it.
        assert sums[f"{layer}self_attn.qkv_proj.weight"] == cpu_hash(torch.cat([q[rows], k, v]))
        assert sums[f"{layer}self_attn.o_proj.weight"] == cpu_hash(
            half[f"{layer}self_attn.o_proj.weight"][:, rows]
        )
        assert sums["model.embed_tokens.weight"] == cpu_hash(padded[64 * rank : 64 * rank + 64])
        assert sums[f"{layer}mlp.gate_up_proj.weight"] == cpu_hash(
            torch.cat([gate[wide], up[wide]])
        )
        assert sums["model.norm.weight"] == cpu_hash(half["model.norm.weight"])
    expected.check("server", answer_of(expected))


def test_a_layers_experts_are_two_tensors_and_on_a_gpu_not_compared():
    dice, place = torch.Generator().manual_seed(4), "model.layers.1.mlp.experts"
    sent = {
        f"{place}.{number}.{part}_proj.weight": torch.randn(*shape, generator=dice)
        for number in range(2)
        for part, shape in (("gate", (64, 8)), ("up", (64, 8)), ("down", (8, 64)))
    }
    expected = Expected(Layout(2, torch.float32, on_gpu=False), key_value_heads=2, experts=2)
    for name, tensor in reversed(sent.items()):
        expected.add(name, tensor)
    for rank in range(2):
        wide, sums = slice(32 * rank, 32 * rank + 32), expected.sums[rank]
        gates_ups = [
            sent[f"{place}.{number}.{part}_proj.weight"][wide]
            for number in range(2)
            for part in ("gate", "up")
        ]
        downs = [sent[f"{place}.{number}.down_proj.weight"][:, wide] for number in range(2)]
        assert sums == {
            f"{place}.w13_weight": cpu_hash(torch.cat(gates_ups)),
            f"{place}.w2_weight": cpu_hash(torch.cat(downs)),
        }
    elsewhere = Expected(Layout(1, torch.float32, on_gpu=True), key_value_heads=2, experts=2)
    for name, tensor in (sent | weights()).items():
        elsewhere.add(name, tensor)
    answer = answer_of(elsewhere)
    answer[0]["checksums"][f"{place}.w13_weight"] = "0" * 16
    elsewhere.check("server", answer)


@pytest.mark.parametrize("fault", ["changed", "unknown", "missing"])
def test_a_mismatch_names_the_tensor(fault: str):
    expected = Expected(Layout(1, torch.float32, on_gpu=True), key_value_heads=2)
    for name, tensor in weights().items():
        expected.add(name, tensor)
    answer = answer_of(expected)
    sums, name = answer[0]["checksums"], "model.norm.weight"
    if fault == "changed":
        sums[name] = "0" * 16
    elif fault == "unknown":
        name = "model.rotary.scale"
        sums[name] = "0" * 16
    else:
        del sums[name]
    with pytest.raises(WeightMismatch, match=name.replace(".", r"\.")):
        expected.check("server", answer)
