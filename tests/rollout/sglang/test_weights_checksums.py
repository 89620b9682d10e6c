"""Reports of a server about its new weights: buckets, hashes, fused tensors."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from megatron_stare.config import EngineError
from megatron_stare.rollout.sglang import weights as module
from megatron_stare.rollout.sglang.weights import (
    Expected,
    ServerLayout,
    WeightMismatch,
    cpu_hash,
    fused_parts,
    results,
)


def test_an_answer_that_never_ends_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MARGIN_SECONDS", 0.0)
    done: Future[int] = Future()
    done.set_result(7)
    assert results([done], 0.01) == [7]
    with pytest.raises(EngineError, match="1 of 2 servers' answers have not ended"):
        results([done, Future()], 0.01)


EXPERTS = {"num_key_value_heads": 2, "num_experts": 2}


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
        {"checksums": dict(sums), "parallelism_info": place}
        for sums, place in zip(expected.sums(), places, strict=True)
    ]


def test_fused_and_split_weights_are_hashed_as_the_ranks_hold_them():
    sent, layer = weights(), "model.layers.0."
    expected = Expected(ServerLayout(2, torch.bfloat16, on_gpu=False), {"num_key_value_heads": 1})
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
            expected.sums()[rank],
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


def test_latent_attention_and_routers_are_hashed_as_the_ranks_hold_them():
    dice, layer = torch.Generator().manual_seed(5), "model.layers.1."
    shapes = {
        "self_attn.q_a_proj.weight": (6, 8),
        "self_attn.q_b_proj.weight": (4, 6),
        "self_attn.kv_a_proj_with_mqa.weight": (10, 8),
        "self_attn.kv_b_proj.weight": (12, 6),
        "self_attn.o_proj.weight": (8, 4),
        "mlp.gate.weight": (4, 8),
        "mlp.gate.e_score_correction_bias": (4,),
    }
    sent = {f"{layer}{name}": torch.randn(shape, generator=dice) for name, shape in shapes.items()}
    half = {name.removeprefix(layer): tensor.bfloat16() for name, tensor in sent.items()}
    for model, rank in itertools.product(("glm4_moe_lite", "deepseek_v3"), range(2)):
        config = {
            "model_type": model,
            "kv_lora_rank": 6,
            "q_lora_rank": 6,
            "num_attention_heads": 2,
        }
        layout = ServerLayout(2, torch.bfloat16, on_gpu=False)
        expected = Expected(layout, config)
        for name, tensor in sent.items():
            expected.add(name, tensor)
        q_b = half["self_attn.q_b_proj.weight"].chunk(2)[rank]
        kv_b = half["self_attn.kv_b_proj.weight"].chunk(2)[rank]
        down = [half[f"self_attn.{part}.weight"] for part in ("q_a_proj", "kv_a_proj_with_mqa")]
        router = "mlp.gate.weight"
        gate = half[router] if model == "deepseek_v3" else sent[f"{layer}{router}"]
        bias = sent[f"{layer}mlp.gate.e_score_correction_bias"]
        held = {
            "self_attn.fused_qkv_a_proj_with_mqa.weight": torch.cat(down),
            "self_attn.q_b_proj.weight": q_b,
            "self_attn.kv_b_proj.weight": kv_b,
            "self_attn.o_proj.weight": half["self_attn.o_proj.weight"].chunk(2, dim=1)[rank],
            "mlp.gate.weight": gate,
            "mlp.gate.e_score_correction_bias": bias,
        }
        found = expected.sums()[rank]
        assert found == {f"{layer}{name}": cpu_hash(tensor) for name, tensor in held.items()}
    assert "fused_qkv_a_proj_with_mqa" not in fused_parts(config | {"q_lora_rank": None})


def test_a_layers_experts_are_two_tensors_and_on_a_gpu_not_compared():
    dice, place = torch.Generator().manual_seed(4), "model.layers.1.mlp.experts"
    sent = {
        f"{place}.{number}.{part}_proj.weight": torch.randn(*shape, generator=dice)
        for number in range(2)
        for part, shape in (("gate", (64, 8)), ("up", (64, 8)), ("down", (8, 64)))
    }
    expected = Expected(ServerLayout(2, torch.float32, on_gpu=False), EXPERTS)
    for name, tensor in reversed(sent.items()):
        expected.add(name, tensor)
    for rank in range(2):
        wide, sums = slice(32 * rank, 32 * rank + 32), expected.sums()[rank]
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
    elsewhere = Expected(ServerLayout(1, torch.float32, on_gpu=True), EXPERTS)
    for name, tensor in (sent | weights()).items():
        elsewhere.add(name, tensor)
    answer = answer_of(elsewhere)
    answer[0]["checksums"][f"{place}.w13_weight"] = "0" * 16
    elsewhere.check("server", answer)


def test_a_routers_bias_stays_in_fp32():
    name, bias = "model.layers.1.mlp.gate.e_score_correction_bias", torch.tensor([0.1, 0.2])
    expected = Expected(ServerLayout(1, torch.bfloat16, on_gpu=False), {"num_key_value_heads": 2})
    expected.add(name, bias)
    assert expected.sums() == [{name: cpu_hash(bias)}]


@pytest.mark.parametrize("fault", ["changed", "unknown", "missing"])
def test_a_mismatch_names_the_tensor(fault: str):
    expected = Expected(ServerLayout(1, torch.float32, on_gpu=True), {"num_key_value_heads": 2})
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
