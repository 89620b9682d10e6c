"""The training data of a run: one source, or several mixed by weight.

A mixture draws in blocks of 1,000: a block holds each source's share of 1,000 (largest remainders,
at least 1), in an order that seed and block decide. A source goes through its own epochs, each a
permutation of its rows, however often the others have gone through theirs. So the number of a draw
alone says which prompt it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy
from transformers import PreTrainedTokenizerBase

from megatron_stare.config import Config, UserError
from megatron_stare.data.prompts import PromptStream, Tools, check_rewarded, load_prompts
from megatron_stare.data.rows import Dropped, read_rows
from megatron_stare.data.screening import PassRates, Screen
from megatron_stare.data.sources import parts
from megatron_stare.records import Prompt

BLOCK = 1000
# Sets the order of a mixture's blocks apart from the order of a source's epochs.
_BLOCKS = 1 << 20


class Mixture(PromptStream):
    """A PromptStream over several lists of prompts; its state is `position` alone, too."""

    def __init__(
        self, sources: Sequence[list[Prompt]], weights: Sequence[float], seed: int, shuffle: bool
    ) -> None:
        super().__init__([prompt for prompts in sources for prompt in prompts], seed, shuffle)
        self.streams = [
            PromptStream(prompts, (seed, place), shuffle) for place, prompts in enumerate(sources)
        ]
        self.shares = shares(weights)
        self._block: tuple[int, Any] = (-1, None)

    def at(self, number: int) -> Prompt:
        """The prompt of one draw, past or to come."""
        block, place = divmod(number, BLOCK)
        order = self._block_order(block)
        source = int(order[place])
        before = block * self.shares[source] + int((order[:place] == source).sum())
        return dataclasses.replace(self.streams[source].at(before), index=number)

    def _block_order(self, block: int) -> Any:
        if self._block[0] != block:
            order = numpy.repeat(numpy.arange(len(self.shares)), self.shares)
            numpy.random.default_rng((*self.seed, _BLOCKS, block)).shuffle(order)
            self._block = (block, order)
        return self._block[1]


def shares(weights: Sequence[float]) -> list[int]:
    """Each source's number of BLOCK draws: in proportion, by largest remainders, at least 1."""
    if len(weights) > BLOCK // 2:
        raise UserError(
            f"data.sources has {len(weights)} sources; join some, {BLOCK // 2} can be mixed"
        )
    exact = [BLOCK * weight / sum(weights) for weight in weights]
    found = [max(1, int(share)) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda place: (found[place] - exact[place], place))
    for place in by_remainder[: max(0, BLOCK - sum(found))]:
        found[place] += 1
    while sum(found) > BLOCK:  # shares of less than 1 were rounded up
        found[found.index(max(found))] -= 1
    return found


def check_sources(config: Config) -> None:
    """UserError, naming the setting: a file or function that data or evaluation.eval_data names is
    not there.
    """
    named = [("data.sources", source) for source in config.data.sources]
    named += [("data.prompt_data", config.data.prompt_data)]
    named += [("data.pass_rates", config.data.pass_rates)]
    named += [(f"evaluation.eval_data.{k}", v) for k, v in config.evaluation.eval_data.items()]
    for setting, source in named:
        if source:
            parts(source, setting)


def training_stream(
    config: Config, tokenizer: PreTrainedTokenizerBase, tools: Tools = ()
) -> tuple[PromptStream, list[str]]:
    """The prompts of data.prompt_data or data.sources, and lines about them for the user."""
    data, evaluation = config.data, config.evaluation
    weights = data.sources or {data.prompt_data: 1.0}
    if "" in weights:
        raise UserError(
            "data.prompt_data is empty; give a .jsonl or .parquet file of problems, or data.sources"
        )
    check_sources(config)
    rates = PassRates(data) if data.pass_rates else None
    screen = Screen(data.deduplicate, _questions(config), data.drop_evaluation_prompts, rates)
    loaded = {source: load_prompts(source, tokenizer, data, screen, tools) for source in weights}
    lines = [
        f"{source}: {dropped.total} rows skipped, {len(prompts)} used: {dropped}"
        for source, (prompts, dropped) in loaded.items()
        if dropped.total
    ]
    if screen.evaluated_rows and not data.drop_evaluation_prompts:
        lines.append(
            f"warning: {screen.evaluated_rows} training rows ask what a row of "
            f"{', '.join(evaluation.eval_data)} asks; data.drop_evaluation_prompts=true leaves "
            "them out"
        )
    sources = [prompts for prompts, _ in loaded.values()]
    for source, prompts in zip(loaded, sources, strict=True):
        check_rewarded(config, prompts, source)
    if not data.sources:
        return PromptStream(sources[0], config.run.seed, data.shuffle), lines
    mixture = Mixture(sources, list(weights.values()), config.run.seed, data.shuffle)
    for source, share, prompts in zip(weights, mixture.shares, sources, strict=True):
        lines.append(
            f"{source}: weight {weights[source]:g}, {share / BLOCK:.1%} of the draws from "
            f"{len(prompts)} prompts"
        )
    return mixture, lines


def _questions(config: Config) -> list[str]:
    """The questions of the evaluation files. Faulty rows are reported where they are used."""
    skip = dataclasses.replace(config.data, on_bad_row="skip")
    return [
        row.question
        for source in config.evaluation.eval_data.values()
        for row in read_rows(source, skip, Dropped())
    ]
