"""GGUF files, written here tensor by tensor from a tiny model, as Hugging Face directories."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_stare.config import UserError
from megatron_stare.policy.conversion.gguf import gguf_to_hf
from tests.tiny_models import LLAMA3_ROPE, tiny_config, write_checkpoint

gguf = pytest.importorskip("gguf")

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    config = tiny_config("llama", vocab_size=64, tie_word_embeddings=False)
    return AutoModelForCausalLM.from_config(config).eval()


def interleaved(weight, heads):
    """The order of a head's rows in GGUF: rotary pairs next to each other."""
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def write_gguf(model, file, quantised=(), architecture="llama", more=lambda writer: None):
    """`more` adds to the file, or changes it."""
    config = model.config
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*map(chr, range(97, 123)), "ab", "cd", *(f"<{n}>" for n in range(36))])
    writer.add_token_types([gguf.TokenType.NORMAL] * 28 + [gguf.TokenType.CONTROL] * 36)
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(28)
    writer.add_eos_token_id(29)
    writer.add_chat_template(TEMPLATE)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        tensor = tensor.float()
        place = {
            "model.embed_tokens.weight": "token_embd.weight",
            "lm_head.weight": "output.weight",
        }
        renamed = {**place, "model.norm.weight": "output_norm.weight"}.get(name, "")
        if not renamed:
            _, _, layer, *inner = name.removesuffix(".weight").split(".")
            part = NAMES[".".join(inner)]
            renamed = f"blk.{layer}.{part}.weight"
            if part in heads:
                tensor = interleaved(tensor, heads[part])
        data, kind = tensor.numpy(), None
        if any(word in renamed for word in quantised):
            kind = gguf.GGMLQuantizationType.Q8_0
            data = gguf.quants.quantize(data, kind)
        writer.add_tensor(renamed, data, raw_dtype=kind)
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_becomes_its_original_model(model, tmp_path):
    write_gguf(model, tmp_path / "tiny.gguf")
    gguf_to_hf(tmp_path / "tiny.gguf", tmp_path / "hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.float()), name
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokens = torch.randint(64, (2, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, model(tokens).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.encode("cab", add_special_tokens=False) == [2, 26]
    assert tokenizer.eos_token_id == 29
    assert tokenizer.chat_template == TEMPLATE
    assert again.config.architectures == ["LlamaForCausalLM"], "SGLang picks its model by it"
    modes = {file.stat().st_mode for file in (tmp_path / "hf").iterdir()}
    assert len(modes) == 1, "another user's server reads the weights too"


def llama_cpp_factors(theta, width, factor):
    """What llama.cpp's converter writes for Llama 3.1, frequency by frequency."""
    found = []
    for pair in range(width // 2):
        length = 2 * math.pi * theta ** (2 * pair / width)
        smooth = (8192 / length - 1) / (4 - 1)
        between = 1 / ((1 - smooth) / factor + smooth)
        found.append(1.0 if length < 8192 / 4 else factor if length > 8192 else between)
    return torch.tensor(found).numpy()


def test_the_rope_scaling_of_llama_3_is_kept(tmp_path):
    config = tiny_config("llama3_rope", vocab_size=64)
    model = AutoModelForCausalLM.from_pretrained(write_checkpoint(tmp_path / "source", config))
    factors = llama_cpp_factors(500000.0, 16, 8.0)
    assert 1 < factors[4] < 8 == factors[5]
    add = lambda writer: writer.add_tensor("rope_freqs.weight", factors)  # noqa: E731
    write_gguf(model, tmp_path / "scaled.gguf", more=add)
    gguf_to_hf(tmp_path / "scaled.gguf", tmp_path / "hf")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert again.config.rope_parameters == LLAMA3_ROPE
    old_names = json.loads((tmp_path / "hf" / "config.json").read_text())  # transformers 4 has them
    assert old_names["rope_scaling"] | {"rope_theta": old_names["rope_theta"]} == LLAMA3_ROPE
    assert torch.equal(again.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    factors[4] *= 1.1
    write_gguf(model, tmp_path / "other.gguf", more=add)
    with pytest.raises(UserError, match=r"rope_freqs.weight is not the scaling of Llama 3\.1"):
        gguf_to_hf(tmp_path / "other.gguf", tmp_path / "other")


UNSUPPORTED = {
    r"rope\.scaling\.type='yarn' is not supported": lambda writer: writer.add_rope_scaling_type(
        gguf.RopeScalingType.YARN
    ),
    "tensor blk.0.attn_q.bias has no place in a llama": lambda writer: writer.add_tensor(
        "blk.0.attn_q.bias", torch.ones(32).numpy()
    ),
    "one of 3 parts": lambda writer: writer.add_uint16("split.count", 3),
    "num_attention_heads=4 but the weights have 8": lambda w: w.add_rope_dimension_count(4),
}


@pytest.mark.parametrize("message", UNSUPPORTED)
def test_what_transformers_passes_over_is_refused(message, model, tmp_path):
    write_gguf(model, tmp_path / "tiny.gguf", more=UNSUPPORTED[message])
    with pytest.raises(UserError, match=message):
        gguf_to_hf(tmp_path / "tiny.gguf", tmp_path / "hf")
    assert [file.name for file in tmp_path.iterdir()] == ["tiny.gguf"]


def test_quantised_tensors_are_dequantised_and_rounded(model, tmp_path):
    """Q8_0: blocks of 32 values share a scale; the largest error is half a step of a block."""
    write_gguf(model, tmp_path / "tiny.gguf", quantised=("attn_v", "ffn_up"))
    gguf_to_hf(tmp_path / "tiny.gguf", tmp_path / "hf", torch.bfloat16)
    found = load_file(tmp_path / "hf" / "model.safetensors")
    for name, tensor in model.state_dict().items():
        assert found[name].dtype == torch.bfloat16
        exact = not ("v_proj" in name or "up_proj" in name)
        step = 0.0 if exact else float(tensor.abs().max()) / 127
        gap = (found[name].float() - tensor.to(torch.bfloat16).float()).abs().max()
        assert float(gap) <= step * 0.5 + (0.0 if exact else 2e-3), name
        assert exact or float(gap) > 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").dtype == torch.bfloat16


def test_files_without_a_model_are_refused(model, tmp_path):
    with pytest.raises(UserError, match="is not a file"):
        gguf_to_hf(tmp_path / "missing.gguf", tmp_path / "hf")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF and nothing more")
    with pytest.raises(UserError, match="is not a GGUF file"):
        gguf_to_hf(tmp_path / "bad.gguf", tmp_path / "hf")
    write_gguf(model, tmp_path / "other.gguf", architecture="gpt2")
    with pytest.raises(UserError, match=r"not a GGUF file|not supported"):
        gguf_to_hf(tmp_path / "other.gguf", tmp_path / "hf")
    whole = tmp_path / "whole.gguf"
    write_gguf(model, whole)
    (tmp_path / "cut.gguf").write_bytes(whole.read_bytes()[: -(1 << 12)])
    with pytest.raises(UserError, match="is not a GGUF file"):
        gguf_to_hf(tmp_path / "cut.gguf", tmp_path / "hf")
    assert not [path for path in tmp_path.iterdir() if "hf" in path.name]
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "mine").touch()
    with pytest.raises(UserError, match="exists"):
        gguf_to_hf(whole, tmp_path / "hf")
