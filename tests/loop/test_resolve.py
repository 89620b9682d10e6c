"""A configuration's files and names are checked before anything is trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_stare.config import Config, UserError, override
from megatron_stare.loop.resolve import (
    check_cache,
    check_correction,
    check_reference_tokens,
    load_tokenizer,
)
from megatron_stare.losses import objective_of
from megatron_stare.policy.build import read_hf_config
from tests.tiny_models import byte_tokenizer, save_tokenizer, tiny_config, write_checkpoint


@pytest.mark.parametrize("written", ["--kv-cache-dtype fp8_e4m3", "--kv-cache-dtype=fp8_e5m2"])
@pytest.mark.parametrize(
    ("family", "refused"),
    [("qwen2", True), ("llama", True), ("qwen3", False), ("qwen3_moe", False), ("glm4_moe", False)],
)
def test_an_fp8_cache_needs_a_norm_of_queries_and_keys(written: str, family: str, refused: bool):
    config = override(Config(), [f"sglang.server_args='--log-level info {written}'"])
    hf = tiny_config(family)
    check_cache(override(config, ["sglang.server_args='--kv-cache-dtype auto'"]), hf)
    if refused:
        with pytest.raises(UserError, match=f"{family} has no norm"):
            check_cache(config, hf)
    else:
        check_cache(config, hf)


@pytest.mark.parametrize(
    ("loss", "correction", "refused"),
    [
        ("dppo_kl", ["token_tis"], True),
        ("dppo", ["icepop"], True),
        ("dppo", ["sequence_tis", "mismatch.accepted=one"], True),
        ("dppo", ["icepop", "mismatch.accepted=one"], False),
        ("dppo", ["geo_rs"], False),
        ("stare", ["token_tis"], False),
    ],
)
def test_a_ratio_to_the_rollout_policy_is_applied_once(
    loss: str, correction: list[str], refused: bool
):
    method, *others = correction
    words = [f"loss.name={loss}", f"mismatch.correction={method}", *others]
    config = override(Config(), words)
    objective = objective_of(config.loss)
    if refused:
        with pytest.raises(UserError, match=f"mismatch.correction={method} would weigh .*{loss}"):
            check_correction(config.mismatch, objective)
    else:
        check_correction(config.mismatch, objective)


def test_a_teacher_reads_the_policys_tokens(tmp_path: Path):
    def teacher(name: str, vocabulary: int, ids: int = 0) -> str:
        place = write_checkpoint(tmp_path / name, tiny_config("qwen2", vocab_size=vocabulary))
        if ids:
            save_tokenizer(place)
            file = place / "tokenizer.json"
            tree = json.loads(file.read_text())
            known = tree["model"]["vocab"]
            if ids == 2:
                known["a"], known["b"] = known["b"], known["a"]
            file.write_text(json.dumps(tree))
        return str(place)

    def check(place: str) -> None:
        options = ["loss.distillation_coef=1", f"policy.ref_hf_checkpoint={place}"]
        size = read_hf_config(place).vocab_size
        check_reference_tokens(override(Config(), options), size, 257, byte_tokenizer())

    check(teacher("larger", 300))
    check(teacher("same", 257, ids=1))
    with pytest.raises(UserError, match=r"has 200 token ids, and the policy uses 257"):
        check(teacher("smaller", 200))
    with pytest.raises(UserError, match=r"another tokenizer: 2 tokens have other ids"):
        check(teacher("other", 257, ids=2))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "deepseek_v3", "mistral"])
@pytest.mark.parametrize(
    "named", ["LlamaTokenizerFast", "LlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer", ""]
)
def test_a_byte_level_tokenizer_is_read_as_it_is(family: str, named: str, tmp_path: Path):
    """Whatever class its config names; digits are split in threes, as no such class does."""
    text = "theorem (a b): a + b = 12345;\n\n  caf\u00e9, it's"
    whole = Tokenizer(models.BPE())
    whole.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\s?\p{L}+|\s+|."), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    whole.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learning = trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    whole.train_from_iterator([text] * 3, learning)
    whole.save(str(tmp_path / "tokenizer.json"))
    tiny_config(family, vocab_size=290).save_pretrained(tmp_path)
    content = {"tokenizer_class": named} if named else {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(str(tmp_path))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == whole.encode(text).ids and tokenizer.decode(ids) == text
    assert "123" in tokenizer.convert_ids_to_tokens(ids)
