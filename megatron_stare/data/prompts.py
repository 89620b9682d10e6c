"""An endless, resumable stream of Prompts: each epoch visits every row once, in an order that seed and epoch decide."""

from __future__ import annotations

import dataclasses
from typing import Any

import jinja2
import numpy
from transformers import PreTrainedTokenizerBase

from megatron_stare.config import DataConfig, UserError
from megatron_stare.data.rows import BadRow, Row, read_rows
from megatron_stare.records import Prompt


def tokenize(row: Row, tokenizer: PreTrainedTokenizerBase, config: DataConfig, index: int) -> Prompt:
    """The Prompt of a row. Messages go through the chat template; text is encoded as it stands.

    BadRow: messages without a chat template, or a prompt longer than data.rollout_max_prompt_len (never cut).
    """
    if isinstance(row.prompt, str):
        text = row.prompt
        ids = tokenizer.encode(text)
    elif not config.apply_chat_template:
        raise BadRow("the prompt is a list of messages but data.apply_chat_template is false")
    elif not tokenizer.chat_template:
        raise BadRow("the prompt is a list of messages but the tokenizer has no chat template")
    else:
        text = _chat_text(row, tokenizer)
        ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) > config.rollout_max_prompt_len:
        raise BadRow(
            f"the prompt has {len(ids)} tokens, over data.rollout_max_prompt_len={config.rollout_max_prompt_len}"
        )
    return Prompt(index, tuple(ids), row.label, row.data_source, text, row.metadata)


def _chat_text(row: Row, tokenizer: PreTrainedTokenizerBase) -> str:
    try:
        return str(tokenizer.apply_chat_template(row.prompt, tokenize=False, add_generation_prompt=True))
    except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
        raise BadRow(f"the chat template refuses the messages ({str(error).splitlines()[0]})") from None


def load_prompts(path: str, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> tuple[list[Prompt], int]:
    """All prompts of a file in file order (index = place among the usable rows), and how many rows were skipped."""
    rows, skipped = read_rows(path, config)
    prompts: list[Prompt] = []
    for row in rows:
        try:
            prompts.append(tokenize(row, tokenizer, config, len(prompts)))
        except BadRow as error:
            if config.on_bad_row == "error":
                raise UserError(
                    f"{path}, row {row.number}: {error}; raise the limit or set data.on_bad_row=skip"
                ) from None
            skipped += 1
    if not prompts:
        raise UserError(f"{path}: every row was skipped; raise data.rollout_max_prompt_len or give other data")
    return prompts, skipped


class PromptStream:
    """Draws prompts without end. `position` counts draws: it is the whole state."""

    def __init__(self, prompts: list[Prompt], seed: int, shuffle: bool = True) -> None:
        self.prompts, self.seed, self.shuffle = prompts, seed, shuffle
        self.position = 0
        self._order: tuple[int, Any] = (-1, None)

    def draw(self, count: int) -> list[Prompt]:
        """The next `count` prompts; each carries its draw number as `index`, unique within the run."""
        drawn = [self.at(number) for number in range(self.position, self.position + count)]
        self.position += count
        return drawn

    def at(self, number: int) -> Prompt:
        """The prompt of one draw, past or to come."""
        epoch, place = divmod(number, len(self.prompts))
        return dataclasses.replace(self.prompts[self._epoch_order(epoch)[place]], index=number)

    def _epoch_order(self, epoch: int) -> Any:
        if self._order[0] != epoch:
            order = numpy.arange(len(self.prompts))
            if self.shuffle:
                numpy.random.default_rng((self.seed, epoch)).shuffle(order)
            self._order = (epoch, order)
        return self._order[1]
