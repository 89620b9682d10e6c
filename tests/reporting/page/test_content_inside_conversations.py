"""A rollout as turns, with nothing lost."""

from __future__ import annotations

from megatron_stare.reporting.page.content import prompt_turns, stretches


def test_chat_templates_are_split_into_turns():
    qwen = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?\n2+2?<|im_end|>\n"
    qwen += "<|im_start|>assistant\n"
    assert prompt_turns(qwen) == [("system", "Be brief."), ("user", "1+1?\n2+2?")]
    llama = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    llama += "<|start_header_id|>assistant<|end_header_id|>\n\n"
    assert prompt_turns(llama) == [("prompt", "<|begin_of_text|>"), ("user", "Hi")]


def test_text_without_a_chat_template_is_one_prompt():
    for text in ("What is 1+1?", "", "<|im_start|>user", "a <|im_end|> b"):
        assert prompt_turns(text) == [("prompt", text)]
    between = "<|im_start|>user\nA<|im_end|>\nloose<|im_start|>user\nB<|im_end|>"
    assert prompt_turns(between) == [("prompt", between)]


def test_stretches_cover_every_token_once():
    assert stretches([1, 1, 0, 0, 0, 1]) == [
        ("policy", 0, 2),
        ("environment", 2, 5),
        ("policy", 5, 6),
    ]
    assert stretches([]) == []
