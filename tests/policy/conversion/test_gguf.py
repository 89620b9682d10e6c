"""GGUF files, written here tensor by tensor from a tiny model, as Hugging Face directories."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_stare.config import UserError
from megatron_stare.policy.conversion.gguf import gguf_to_hf
from tests.tiny_models import tiny_config

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


def write_gguf(model, file, quantised=(), architecture="llama"):
    config = model.config
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
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
    with pytest.raises(UserError, match="exists"):
        gguf_to_hf(whole, tmp_path / "hf")
