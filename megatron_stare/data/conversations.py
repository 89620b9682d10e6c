"""Conversations as training sequences, with a mask of the tokens that the assistant wrote.

The chat template renders a conversation in stretches: the text up to an assistant's turn, the turn,
and so on. Each stretch is tokenised by itself, as in a rollout, where a turn's tokens are sampled
and later text is appended. Only the assistant's tokens, including the end of its turn, have a loss;
prompts and tool results have none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_stare.data.prompts import chat_text
from megatron_stare.data.rows import BadRow


def tokenize_conversation(
    messages: Sequence[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Any] = (),
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids, and a mask of equal length that is 1 on what the assistant wrote. `variables`: of
    the chat template.

    BadRow: no assistant's turn, a template that refuses the messages, or one that rewrites earlier
    turns (drops their reasoning, say), so that no single sequence holds what the model saw and
    wrote.
    """
    ids: list[int] = []
    mask: list[int] = []
    for text, written in _stretches(messages, tokenizer, tools, variables):
        found = tokenizer.encode(text, add_special_tokens=False) if text else []
        ids += found
        mask += [int(written)] * len(found)
    return tuple(ids), tuple(mask)


def _stretches(
    messages: Sequence[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Any],
    variables: Mapping[str, Any],
) -> Iterator[tuple[str, bool]]:
    """Pairs (text, whether the assistant wrote it). Text after the assistant's last turn is left
    out.
    """
    turns = [
        number for number, message in enumerate(messages) if message.get("role") == "assistant"
    ]
    if not turns:
        raise BadRow("field 'messages' has no message of role assistant")
    rendered = ""
    for number in turns:
        before = chat_text(messages[:number], tokenizer, tools, variables)
        through = chat_text(messages[: number + 1], tokenizer, tools, variables, generate=False)
        if not before.startswith(rendered) or not through.startswith(before):
            raise BadRow(
                f"message {number}: the chat template rewrites what stands before it; give one row "
                "per turn of the assistant"
            )
        yield before[len(rendered) :], False
        written, end, after = through[len(before) :].rpartition(str(tokenizer.eos_token))
        yield (written + end if end else after), True
        rendered = through[: len(through) - len(after)] if end else through
