"""Rows through the chat template: an endless, resumable stream of Prompts, and conversations as
training sequences.

Each epoch visits every row once, in an order that the seed and the epoch's number decide.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jinja2
import numpy
from transformers import PreTrainedTokenizerBase

from megatron_stare.config import Config, DataConfig, UserError, source_of
from megatron_stare.data.rows import BadRow, Dropped, Row, checked_text, read_rows
from megatron_stare.data.screening import Screen
from megatron_stare.records import Prompt
from megatron_stare.system import digest, prompt_date

TOO_LONG = "over data.rollout_max_prompt_len"

Tools = Sequence[Mapping[str, Any]]  # function schemas, as chat templates take them


def tokenize(
    row: Row, tokenizer: PreTrainedTokenizerBase, config: DataConfig, index: int, tools: Tools = ()
) -> Prompt:
    """The Prompt of a row. Messages go through the chat template, with the row's tools, or `tools`
    where it has none; text is encoded as it stands.

    BadRow: messages or tools without a chat template, or a prompt longer than
    data.rollout_max_prompt_len (never cut).
    """
    messages = chat_messages(row.prompt, config)
    if not messages:
        if row.tools or config.system_prompt:
            what = f"field {config.tool_key!r}" if row.tools else "data.system_prompt"
            raise BadRow(f"{what} needs messages but the prompt is text; set data.wrap_text=true")
        text = checked_text(str(row.prompt), "the prompt")
        ids = tokenizer.encode(text)
    elif not config.apply_chat_template:
        raise BadRow("the prompt is a list of messages but data.apply_chat_template is false")
    elif not tokenizer.chat_template:
        raise BadRow(
            "the prompt is a list of messages but the tokenizer has no chat template (give the "
            "problem as text, or write chat_template.jinja next to the tokenizer)"
        )
    else:
        offered = row.tools or tuple(map(dict, tools))
        text = chat_text(messages, tokenizer, offered, config.chat_template_kwargs)
        ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) > config.rollout_max_prompt_len:
        limit = config.rollout_max_prompt_len
        raise BadRow(
            f"the prompt has {len(ids)} tokens, over data.rollout_max_prompt_len={limit}; raise it",
            TOO_LONG,
        )
    given = (row.label, text, row.metadata, messages, row.tools)
    return Prompt(index, numpy.array(ids, numpy.int32), *given)


def chat_messages(
    prompt: str | Sequence[dict[str, Any]], config: DataConfig
) -> tuple[dict[str, Any], ...]:
    """The messages for the chat template; none for a prompt that is plain text."""
    if isinstance(prompt, str):
        if not config.wrap_text:
            return ()
        prompt = [{"role": "user", "content": prompt}]
    if config.system_prompt and prompt[0].get("role") != "system":
        prompt = [{"role": "system", "content": config.system_prompt}, *prompt]
    return tuple(prompt)


def chat_text(
    messages: Sequence[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    tools: Tools,
    variables: Mapping[str, Any],
    generate: bool = True,
) -> str:
    """The messages through the chat template; with `generate`, up to the assistant's next turn.
    BadRow: the template refuses them.
    """
    try:
        text = str(
            tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=generate,
                **{"strftime_now": prompt_date, **variables},
            )
        )
    except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadRow(f"the chat template refuses the messages ({first})") from None
    return checked_text(text, "the conversation")


def tokenize_conversation(
    messages: Sequence[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Any] = (),
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids, and a mask of equal length: 1 on what the assistant wrote, including the end of
    its turn, and 0 on prompts and tool results. `variables`: of the chat template.

    The template renders a conversation in stretches: the text up to an assistant's turn, the turn,
    and so on. Each is tokenised by itself, as in a rollout, where a turn's tokens are sampled and
    later text is appended.

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
    added = tokenizer.added_tokens_decoder.values()
    ends = tuple(token.content for token in added if token.special)
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
        turn = through[len(before) :]
        if turn.rstrip().endswith(ends):  # white space after the end is the template's
            turn = turn.rstrip()
        yield turn, True
        rendered = before + turn


def check_template(tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> None:
    """UserError: data.chat_template_kwargs has a name that the chat template does not read, or that
    the trainer sets.
    """
    template = str(tokenizer.chat_template or "")
    own = inspect.signature(tokenizer.apply_chat_template).parameters
    for name, value in config.chat_template_kwargs.items():
        if name in own or not re.search(rf"\b{re.escape(name)}\b", template):
            reason = "the trainer sets it" if name in own else "the chat template does not read it"
            raise UserError(
                f"data.chat_template_kwargs has {name}={value!r}: {reason}; leave it out"
            )


def load_prompts(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    screen: Screen | None = None,
    tools: Tools = (),
) -> tuple[list[Prompt], Dropped]:
    """All prompts of a source in its order (index = place among them), and the rows left out."""
    check_template(tokenizer, config)
    dropped = Dropped()
    screen = screen or Screen()
    prompts: list[Prompt] = []
    for row in screen.kept(read_rows(source, config, dropped), dropped):
        try:
            prompt = tokenize(row, tokenizer, config, len(prompts), tools)
        except BadRow as error:
            dropped.refuse(row, error, config)
            continue
        reason, counts = screen.refusal(prompt)
        if reason:
            dropped.note(reason, row, counts)
        else:
            prompts.append(prompt)
    if not prompts:
        raise UserError(
            f"{source}: every row was dropped ({dropped}); change data.*, or give other data"
        )
    return prompts, dropped


def check_rewarded(config: Config, prompts: Iterable[Prompt], where: str) -> None:
    """UserError: a prompt is of a data set without a reward in scoring.per_source."""
    known, key = config.scoring.per_source, config.data.source_key
    for prompt in prompts if known else ():
        source = source_of(prompt.metadata)
        if source not in known:
            what = f"is of the data set {source!r}" if source else f"has no {key!r}"
            raise UserError(
                f"{where}: a row {what}, and scoring.per_source has a reward for "
                f"{', '.join(known)}; add one, or correct the row or data.source_key"
            )


def prompts_digest(prompts: Iterable[Prompt]) -> str:
    """16 hex digits of the prompts' token ids, in order. Labels and metadata may be corrected
    during a run.
    """
    return digest("".join(digest(prompt.token_ids, 16) for prompt in prompts), 16)


class PromptStream:
    """Draws prompts without end. `position` counts draws: it is the whole state."""

    def __init__(
        self, prompts: list[Prompt], seed: int | tuple[int, ...], shuffle: bool = True
    ) -> None:
        self.prompts, self.shuffle = prompts, shuffle
        self.seed = seed if isinstance(seed, tuple) else (seed,)
        self.position = 0
        self._order: tuple[int, Any] = (-1, None)

    def draw(self, count: int) -> list[Prompt]:
        """The next `count` prompts; each has its draw number as `index`, unique within the run."""
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
                numpy.random.default_rng((*self.seed, epoch)).shuffle(order)
            self._order = (epoch, order)
        return self._order[1]
