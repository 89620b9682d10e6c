"""The reward `judge`: verdicts from a language model's answers.

A response has a value only if every question about it has an answer; else it is unverifiable.

Pairwise, the responses to one prompt are compared with one another: all pairs of up to 8 different
texts, beyond it judge.opponents on a ring that is ordered by the hashes of the texts, so that the
order of the group changes nothing. Both orders of a pair are asked, and a contradiction is a tie.
value = mean over opponents of 1 (won), 0.5 (tie), 0 (lost); equal texts tie. A response that was
compared with fewer than half of its opponents is unverifiable.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_stare.config import JudgeConfig
from megatron_stare.event_loop import EventLoopThread
from megatron_stare.scoring.llm_judge.asking import JudgeClient, Reply
from megatron_stare.scoring.llm_judge.questions import Questions
from megatron_stare.scoring.verdict import Sample, Verdict, groups_of, printable, unverifiable
from megatron_stare.system import digest

ALL_PAIRS = 8  # different responses to one prompt up to which all are compared


class LLMJudge:
    """A reward backend; safe to use from many threads. Close it at the end."""

    def __init__(
        self,
        settings: JudgeConfig,
        urls: Callable[[], Sequence[str]],
        directory: Path | None = None,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """`urls`: the servers' addresses; `close` ends them. UserError: a file cannot be read."""
        self.settings, self.questions = settings, Questions(settings)
        self.client = JudgeClient(settings, urls, directory)
        self._close = close
        self._thread = EventLoopThread("llm-judge")

    def judge(self, samples: Sequence[Sample]) -> list[Verdict]:
        """One Verdict per sample, in order."""
        work = self._paired if self.settings.kind == "pairwise" else self._each
        return self._thread.run(work(samples))

    def close(self) -> None:
        """End the connections, and the servers if they are the run's."""
        if self._thread.running:
            self._thread.run(self.client.close())
            self._thread.stop()
        self._close()

    async def _each(self, samples: Sequence[Sample]) -> list[Verdict]:
        replies = await self._within([self._one(sample) for sample in samples])
        return [_late(self.settings) if found is None else found for found in replies]

    async def _within(self, work: Sequence[Any]) -> list[Any]:
        """The results within judge.group_timeout; None where it passed."""
        tasks = [asyncio.ensure_future(each) for each in work]
        if tasks:
            await asyncio.wait(tasks, timeout=self.settings.group_timeout)
        found = [task.result() if task.done() else None for task in tasks]
        for task in tasks:
            task.cancel()
        return found

    async def _one(self, sample: Sample) -> Verdict:
        try:
            questions = self.questions.of(sample)
        except ValueError as error:
            return unverifiable(printable(str(error)))
        asked = (self.client.ask(question, sample) for question, _ in questions)
        replies = await asyncio.gather(*asked)
        total = 0.0
        for reply, (_, weight) in zip(replies, questions, strict=True):
            if reply.value is None:
                return _counted(unverifiable(reply.reason), replies)
            total += reply.value * weight
        value = total / sum(weight for _, weight in questions)
        said = "\n".join(reply.text for reply in replies)
        return _counted(_verdict(value, said), replies)

    async def _paired(self, samples: Sequence[Sample]) -> list[Verdict]:
        groups = groups_of(samples)
        asked = (self._group([samples[p] for p in places]) for places in groups)
        verdicts: list[Verdict] = [unverifiable("")] * len(samples)
        for places, found in zip(groups, await asyncio.gather(*asked), strict=True):
            for place, verdict in zip(places, found, strict=True):
                verdicts[place] = verdict
        return verdicts

    async def _group(self, samples: Sequence[Sample]) -> list[Verdict]:
        if len(samples) < 2:
            return [unverifiable("judge.kind=pairwise needs two responses to a prompt")]
        texts = sorted({sample.response for sample in samples}, key=digest)
        pairs = opponents(len(texts), self.settings.opponents)
        found = await self._within([self._compared(samples[0], texts, pair) for pair in pairs])
        results = dict(zip(pairs, found, strict=True))
        return [self._mean(texts.index(one.response), samples, texts, results) for one in samples]

    async def _compared(
        self, sample: Sample, texts: Sequence[str], pair: tuple[int, int]
    ) -> tuple[float | None, Sequence[Reply]]:
        """1: the first of the pair is better; both orders count."""
        first, second = (texts[place] for place in pair)
        between = self.questions.between
        replies = await asyncio.gather(
            self.client.ask(between(sample.prompt, first, second), sample),
            self.client.ask(between(sample.prompt, second, first), sample),
        )
        forth, back = (reply.value for reply in replies)
        if forth is None or back is None:
            return None, replies
        return forth if forth == 1 - back else 0.5, replies

    def _mean(
        self,
        own: int,
        samples: Sequence[Sample],
        texts: Sequence[str],
        results: dict[tuple[int, int], Any],
    ) -> Verdict:
        """The verdict of the samples with the text `own`."""
        times = [sum(sample.response == text for sample in samples) for text in texts]
        values, compared, wanted = 0.5 * (times[own] - 1), times[own] - 1, times[own] - 1
        said, replies, reason = [], [], ""
        for pair, found in results.items():
            if own not in pair:
                continue
            other = pair[1] if pair[0] == own else pair[0]
            wanted += times[other]
            if found is None:
                reason = reason or _late(self.settings).reason
                continue
            value, asked = found
            replies += asked
            if value is None:
                reason = reason or next(each.reason for each in asked if each.value is None)
                continue
            compared += times[other]
            values += times[other] * (value if pair[0] == own else 1 - value)
            said += [reply.text for reply in asked]
        if 2 * compared < wanted:
            why = f"compared with {compared} of {wanted} responses ({reason})"
            return _counted(unverifiable(why), replies, 2)
        return _counted(_verdict(values / compared, "\n".join(said)), replies, 2)


def opponents(count: int, most: int) -> list[tuple[int, int]]:
    """The pairs of `count` responses: all, or on a ring `most` opponents of each (rounded up to an
    even number).
    """
    if count <= max(ALL_PAIRS, most + 1):
        return [(a, b) for a in range(count) for b in range(a + 1, count)]
    steps = range(1, -(-most // 2) + 1)
    return sorted({tuple(sorted((a, (a + step) % count))) for a in range(count) for step in steps})  # type: ignore[misc]


def _verdict(value: float, said: str) -> Verdict:
    return Verdict(value, "correct" if value > 0.5 else "wrong", reason=said)


def _late(settings: JudgeConfig) -> Verdict:
    return unverifiable(f"no answer within judge.group_timeout={settings.group_timeout:g} s")


def _counted(verdict: Verdict, replies: Sequence[Reply], shared: int = 1) -> Verdict:
    """The verdicts with the cost of the replies, of which each belongs to `shared` responses."""
    counts = {
        "judge/calls": sum(reply.asked for reply in replies) / shared,
        "judge/tokens": sum(reply.tokens for reply in replies) / shared,
        "judge/seconds": max((reply.seconds for reply in replies), default=0.0),
    }
    return dataclasses.replace(verdict, counts=counts)
