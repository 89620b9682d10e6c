"""Quantisation with the real modelopt on tiny models:
the written file, its decoded values, and the reported error.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip(
    "modelopt", reason="nvidia-modelopt is not installed: pip install 'megatron-stare[quantize]'"
)
pytest.importorskip("scipy", reason="nvidia-modelopt needs scipy")

from megatron_stare.policy import quantization
from megatron_stare.policy.quantization import (
    compare,
    decode_weight,
    load_exported,
    measure,
    round_fp8,
    round_int8,
    round_nvfp4,
)
from tests.reference import divergence
from tests.tiny_models import tiny_config, write_checkpoint

STORED = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "nvfp4": torch.uint8}
ALGORITHMS = {"fp8": "FP8", "int8": "W8A8_SQ_PER_CHANNEL", "nvfp4": "NVFP4"}
FAMILIES = {
    "fp8": ("qwen2", "qwen2_tied", "qwen3", "qwen3_tied", "llama", "llama3_rope"),
    "int8": ("qwen2", "qwen3_tied", "llama3_rope"),
    "nvfp4": ("qwen2", "qwen3_tied", "llama3_rope"),
}
WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


def sequences(count: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, 71, (12 + 5 * number,), generator=generator).tolist()
        for number in range(count)
    ]


CALIBRATION, MEASURING = sequences(4, 1), sequences(3, 2)


def source_of(directory: Path, family: str, dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint in several files whose widths nvfp4's groups of 16 divide."""
    source = write_checkpoint(
        directory / "source", tiny_config(family, **WIDE), max_shard_size="40KB"
    )
    if dtype != torch.float32:
        quantization.load_model(source).to(dtype).save_pretrained(source)
    return source


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in directory.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def exported(source: Path, target: Path, format_name: str) -> dict[str, torch.Tensor]:
    """The tensors of an export to `target`."""
    model = quantization.quantize_model(quantization.load_model(source), format_name, CALIBRATION)
    quantization.export_model(model, source, target)
    return tensors_of(target)


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([model(torch.tensor([token_ids])).logits[0] for token_ids in MEASURING])


@pytest.mark.parametrize(
    ("format_name", "family"),
    [(name, family) for name, families in FAMILIES.items() for family in families],
)
def test_every_family_exports_in_every_format(
    tmp_path: Path, format_name: str, family: str
) -> None:
    source = source_of(tmp_path, family)
    original, tensors = tensors_of(source), exported(source, tmp_path / "target", format_name)
    linear = {name for name in original if "_proj.weight" in name}
    assert len(linear) == 14
    for name, tensor in original.items():
        if name not in linear:
            assert torch.equal(tensors[name], tensor), "what is not quantised stays as it is"
            continue
        assert tensors[name].dtype == STORED[format_name]
        scales = {
            part: tensors[f"{name}_{part}"]
            for part in ("scale", "scale_2")
            if f"{name}_{part}" in tensors
        }
        decoded = decode_weight(
            tensors[name], {f"weight_{part}": scale for part, scale in scales.items()}
        )
        factor = tensors.get(name.replace("weight", "pre_quant_scale"), torch.ones(tensor.shape[1]))
        relative = (decoded * factor - tensor).norm() / tensor.norm()
        assert 0 < relative < {"fp8": 0.035, "int8": 0.02, "nvfp4": 0.12}[format_name]
        assert tensors[name.replace("weight", "input_scale")] > 0
    written = json.loads((tmp_path / "target/hf_quant_config.json").read_text())
    assert written["quantization"]["quant_algo"] == ALGORITHMS[format_name]
    config = json.loads((tmp_path / "target/config.json").read_text())
    assert config["quantization_config"]["quant_algo"] == ALGORITHMS[format_name]
    assert "lm_head" in config["quantization_config"]["ignore"]
    error = measure(quantization.load_model(source), load_exported(tmp_path / "target"), MEASURING)
    assert error.positions == sum(map(len, MEASURING)) == error.next_tokens + len(MEASURING)
    assert 0 < error.kl_mean < error.kl_p99 <= error.kl_max < 5
    assert 0 < abs(error.surprisal_shift_mean) < error.surprisal_shift_mean_abs < 2
    assert 0.2 < error.top1_agreement <= 1


@pytest.mark.parametrize("format_name", ["fp8", "int8"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_tied"])
def test_the_export_computes_what_modelopt_simulates(
    tmp_path: Path, family: str, format_name: str
) -> None:
    from modelopt.torch.export.unified_export_hf import requantize_resmooth_fused_llm_layers

    source = source_of(tmp_path, family)
    model = quantization.quantize_model(quantization.load_model(source), format_name, CALIBRATION)
    requantize_resmooth_fused_llm_layers(model)  # the export's first step
    simulated = logits(model)
    quantization.export_model(model, source, tmp_path / "target")
    read_back = logits(load_exported(tmp_path / "target"))
    torch.testing.assert_close(read_back, simulated, atol=1e-4, rtol=0)
    assert (read_back - logits(quantization.load_model(source))).abs().max() > 0.1


@pytest.mark.parametrize("format_name", ["fp8", "nvfp4"])
def test_layers_that_servers_merge_share_their_scales(tmp_path: Path, format_name: str) -> None:
    tensors = exported(source_of(tmp_path, "llama"), tmp_path / "target", format_name)
    part = {"fp8": "weight_scale", "nvfp4": "weight_scale_2"}[format_name]
    for layer in range(2):
        for block, names in (("self_attn", "qkv"), ("mlp", ("gate", "up"))):
            for scale in (part, "input_scale"):
                values = {
                    tensors[f"model.layers.{layer}.{block}.{name}_proj.{scale}"].item()
                    for name in names
                }
                assert len(values) == 1
    assert (
        tensors["model.layers.0.self_attn.o_proj.weight_scale"].numel()
        == {"fp8": 1, "nvfp4": 64 * 4}[format_name]
    )


def test_nvfp4_decodes_and_rounds_as_modelopt_does() -> None:
    """modelopt simulates nvfp4 on a GPU only; its packed tensors are plain torch."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)) * 3
    x[0, :16] = 0
    x[1, :16] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2)  # ties
    for saturation in (1.0, 0.4):
        scale = saturation * x.abs().max() / (6 * 448)
        packed, group_scale, _ = NVFP4QTensor.quantize(
            x.clone(), 16, weights_scaling_factor_2=scale
        )
        expected = packed.dequantize(
            torch.float32, scale=group_scale, double_scale=scale, block_sizes={-1: 16}
        )
        scales = {"weight_scale": group_scale, "weight_scale_2": scale}
        torch.testing.assert_close(
            decode_weight(packed._quantized_data, scales), expected, atol=1e-6, rtol=0
        )
        torch.testing.assert_close(round_nvfp4(x, scale), expected, atol=1e-6, rtol=0)


def test_rounding_is_to_the_nearest_and_saturates() -> None:
    scale = torch.tensor(0.5)
    assert round_int8(torch.tensor([0.1, 0.3, 63.6, 80.0, -80.0]), scale).tolist() == [
        0,
        0.5,
        63.5,
        63.5,
        -64,
    ]
    # E4M3 has three bits after the leading one: 16, 18, ... below 32, and 448 is its largest
    # number.
    assert round_fp8(torch.tensor([8.4, 8.6, 300.0, -300.0]), scale).tolist() == [8, 9, 224, -224]
    # E2M1 in a group whose largest magnitude is 6 x scale: its levels are 0.5, 1, 1.5, 2, 3, 4 and
    # 6 times that.
    x = torch.tensor([6.0, 0.2, 0.3, 1.3, 2.6, -3.6, 4.9, 5.1] + [0.0] * 8)
    assert round_nvfp4(x, torch.tensor(1.0))[:8].tolist() == [6, 0, 0.5, 1.5, 3, -4, 4, 6]


def test_the_error_is_the_naive_one_and_grows_with_coarseness(tmp_path: Path) -> None:
    source = source_of(tmp_path, "qwen2")
    original = quantization.load_model(source)
    errors = {}
    for format_name in FAMILIES:
        exported(source, tmp_path / format_name, format_name)
        errors[format_name] = measure(original, load_exported(tmp_path / format_name), MEASURING)
    assert errors["nvfp4"].kl_mean > 2 * max(errors["fp8"].kl_mean, errors["int8"].kl_mean)
    read_back = load_exported(tmp_path / "fp8")
    p_logits, q_logits = logits(original), logits(read_back)
    naive = divergence(p_logits, q_logits)
    error = errors["fp8"]
    assert error.kl_mean == pytest.approx(numpy.mean(naive), rel=1e-9)
    assert error.kl_p99 == pytest.approx(numpy.quantile(naive, 0.99), rel=1e-9)
    assert error.kl_max == pytest.approx(max(naive), rel=1e-9)
    agreement = (p_logits.argmax(1) == q_logits.argmax(1)).double().mean()
    assert error.top1_agreement == pytest.approx(agreement.item())
    shifts, surprisals, start = [], [], 0
    for token_ids in MEASURING:
        for place, token in enumerate(token_ids[1:], start=start):
            p, q = (
                torch.log_softmax(rows[place].double(), 0)[token].item()
                for rows in (p_logits, q_logits)
            )
            shifts.append(p - q)
            surprisals.append(-p)
        start += len(token_ids)
    assert error.surprisal_shift_mean == pytest.approx(numpy.mean(shifts), rel=1e-9)
    assert error.surprisal_shift_mean_abs == pytest.approx(numpy.mean(numpy.abs(shifts)), rel=1e-9)
    assert error.surprisal_original == pytest.approx(numpy.mean(surprisals), rel=1e-9)


def test_the_error_does_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    p, q = torch.randn(2, 23, 71, generator=generator)
    token = torch.randint(0, 71, (23,), generator=generator)
    whole = compare(p, q, token)
    monkeypatch.setattr("megatron_stare.policy.quantization._CHUNK_BYTES", 8 * 71 * 5)
    for one, other in zip(whole, compare(p, q, token), strict=True):
        assert torch.equal(one, other)


def test_a_bf16_checkpoint_stays_bf16(tmp_path: Path) -> None:
    source = source_of(tmp_path, "qwen3", torch.bfloat16)
    tensors = exported(source, tmp_path / "target", "fp8")
    assert {tensor.dtype for name, tensor in tensors.items() if not name.endswith("scale")} == {
        torch.bfloat16,
        torch.float8_e4m3fn,
    }
    read_back = load_exported(tmp_path / "target")
    assert read_back.dtype == torch.bfloat16
    assert 0 < measure(quantization.load_model(source), read_back, MEASURING).kl_mean < 1


def test_an_export_with_a_tensor_missing_is_not_measured(tmp_path: Path) -> None:
    exported(source_of(tmp_path, "llama"), tmp_path / "target", "fp8")
    tensors = tensors_of(tmp_path / "target")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "target/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight"):
        load_exported(tmp_path / "target")


def test_responses_are_sampled_from_the_model(tmp_path: Path) -> None:
    """At temperature 1 without truncation:
    the tokens' mean surprisal is the model's mean entropy.
    """
    model = quantization.load_model(source_of(tmp_path, "qwen2"))
    model.generation_config.eos_token_id = None
    # a checkpoint's own sampling defaults must not cut the distribution
    model.generation_config.top_k = 3
    extended = quantization.sample_responses(model, [[5, 6, 7]] * 20, 8, seed=0)
    assert all(token_ids[:3] == [5, 6, 7] and len(token_ids) == 11 for token_ids in extended)
    assert extended == quantization.sample_responses(model, [[5, 6, 7]] * 20, 8, seed=0)
    assert len({tuple(token_ids) for token_ids in extended}) == 20
    with torch.no_grad():
        log_p = torch.log_softmax(model(torch.tensor(extended)).logits[:, 2:-1].double(), -1)
    surprisal = -log_p.gather(2, torch.tensor(extended)[:, 3:, None]).squeeze(2)
    entropy = -(log_p.exp() * log_p).sum(2)
    spread = (surprisal - entropy).std() / surprisal.numel() ** 0.5
    assert (surprisal - entropy).mean().abs() < 4 * spread
