"""The tokens that end a response."""

from __future__ import annotations

from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from megatron_stare.config import UserError

# SGLang stops at these ends of a turn without any configuration, and calls the response complete.
_TURN_ENDS = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")


def stop_ids(hf_checkpoint: str, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every id that ends a response: the tokenizer's, config.json's and generation_config.json's,
    and those of the vocabulary's own turn ends.
    """
    config = AutoConfig.from_pretrained(hf_checkpoint, local_files_only=True).get_text_config()
    try:
        generation = GenerationConfig.from_pretrained(hf_checkpoint, local_files_only=True)
    except OSError:
        generation = GenerationConfig()
    found: list[int] = []
    for value in (
        tokenizer.eos_token_id,
        getattr(config, "eos_token_id", None),
        generation.eos_token_id,
    ):
        found += value if isinstance(value, list) else [] if value is None else [value]
    if not found:
        raise UserError(
            f"{hf_checkpoint}: no eos_token_id in tokenizer, config.json or "
            "generation_config.json; set one"
        )
    added = tokenizer.get_added_vocab()
    return frozenset(found) | {added[text] for text in _TURN_ENDS if text in added}
