"""Accept lengths of n-gram drafts, computed offline from the recorded rollouts of a run.

A drafter looks for the longest suffix of a sequence, of at most `longest` tokens, that occurred
earlier in its sources, and drafts the k tokens that followed its latest occurrence. The server
verifies the draft in one decoding step: draft tokens are accepted up to the first one that differs
from the sampled token, and the sampled token after them is free. So a step yields 1 to k + 1
tokens, and

    accept length = tokens of the policy / decoding steps

A deterministic draft is accepted exactly if the target's sample equals it, and the samples do not
depend on drafts. Hence the recorded tokens give the accept length exactly, for every drafter.

Rollouts of a step advance together, one decoding step at a time: a draft sees of another rollout
only what was sampled before. A draft ends with the turn: what follows a tool call is not a sample.

Sources:
    own     the prompt and the response so far
    group   and the responses of the group so far
    earlier own, and earlier steps' responses to the same prompt
    step    every response of the step so far: what SGLang's n-gram cache holds
    all     step and earlier; of equally long matches, the group's first
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from megatron_stare.config import UserError
from megatron_stare.loop.record import recorded_groups
from megatron_stare.loop.run_directory import read_head, recorded_steps, records_directory
from megatron_stare.planning.plan import make_plan
from megatron_stare.planning.serving import NO_DRAFTS, Drafts
from megatron_stare.planning.tables import aligned
from megatron_stare.recipes import cluster_of, find_recipe
from megatron_stare.records import Group, Rollout, trained_sequences

SOURCES = ("own", "group", "earlier", "step", "all")
POSITIONS = (0, 16, 64, 256, 1024, 4096, 16384)
_READ_EARLIER = ("earlier", "all")
_WIDTH = 4  # bytes of a token


@dataclass(eq=False)
class Text:
    """A sequence of a recorded rollout, of which the first `known` tokens have been sampled."""

    prompt: bytes  # of its group
    content: bytes  # prompt and response, int32
    sampled: numpy.ndarray  # bool: of every token, whether the policy sampled it
    start: int  # tokens before the response
    group: int  # its number in the step
    step: int  # in the order of time
    known: int = 0

    @property
    def tokens(self) -> int:
        return len(self.sampled)

    def piece(self, first: int, last: int) -> bytes:
        """Tokens [first, last)."""
        return self.content[first * _WIDTH : last * _WIDTH]


class Match(NamedTuple):
    """The latest occurrence of a suffix of `length` tokens; its continuation begins at `end`."""

    length: int
    text: Text
    end: int


class Index:
    """The latest place of every n-gram of up to `longest` tokens that has a continuation."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self._places: dict[bytes, tuple[Text, int]] = {}

    def add(self, text: Text, first: int, last: int) -> None:
        """The n-grams that end before the tokens [first, last), which are known now."""
        for end in range(max(1, first), last):
            for length in range(1, min(self.longest, end) + 1):
                self._places[text.piece(end - length, end)] = (text, end)

    def find(self, text: Text) -> Match | None:
        """The longest suffix of the text's known tokens."""
        for length in range(min(self.longest, text.known), 0, -1):
            if place := self._places.get(text.piece(text.known - length, text.known)):
                return Match(length, *place)
        return None


@dataclass
class Counts:
    """Sums over decoding steps."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, drafted: int, accepted: int) -> None:
        """One decoding step."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted

    @property
    def tokens(self) -> int:
        """Of the policy: the accepted ones, and a free one in every step."""
        return self.steps + self.accepted

    @property
    def accept_length(self) -> float:
        return self.tokens / max(1, self.steps)


@dataclass
class Measured:
    """One drafter over all recorded rollouts."""

    source: str
    draft_tokens: int
    total: Counts = field(default_factory=Counts)
    tail: Counts = field(default_factory=Counts)  # the longest tenth of every step's responses
    by_position: dict[int, Counts] = field(default_factory=lambda: defaultdict(Counts))
    by_origin: dict[str, Counts] = field(default_factory=lambda: defaultdict(Counts))


def texts(groups: Sequence[Group], step: int) -> list[Text]:
    """Every sequence of a step's groups that the policy sampled tokens of."""
    found = []
    owner = [number for number, group in enumerate(groups) for _ in group.rollouts]
    for each in trained_sequences(groups):
        assert isinstance(each.rollout, Rollout), "records have tokens"
        if not each.rollout.loss_tokens:
            continue
        before, number = each.group.prompt.token_ids, owner[each.number]
        content = numpy.concatenate([before, each.rollout.response_ids]).astype("<i4").tobytes()
        sampled = numpy.concatenate([numpy.zeros(len(before), bool), each.rollout.loss_mask])
        prompt = groups[number].prompt.token_ids.tobytes()
        found.append(Text(prompt, content, sampled, len(before), number, step))
    return found


def measure(
    steps: Iterable[Sequence[Text]], source: str, draft_tokens: int, longest: int
) -> Measured:
    """The drafter's counts over the steps, which are in the order of time."""
    measured = Measured(source, draft_tokens)
    earlier: dict[bytes, Index] = defaultdict(lambda: Index(longest))
    for step in steps:
        _Replay(step, measured, earlier, longest).run()
        if source in _READ_EARLIER:
            for text in step:
                earlier[text.prompt].add(text, text.start, text.tokens)
    return measured


class _Replay:
    """The rollouts of one step, decoded together."""

    def __init__(
        self,
        step: Sequence[Text],
        measured: Measured,
        earlier: Mapping[bytes, Index],
        longest: int,
    ) -> None:
        self.step, self.measured = step, measured
        for text in step:
            text.known = 0
        shared: dict[object, Index] = defaultdict(lambda: Index(longest))
        # of every text: the indices that it adds to, and those that it reads
        self.written: dict[Text, list[Index]] = {}
        self.read: dict[Text, list[Index]] = {}
        for text in step:
            source = measured.source
            scopes: dict[str, tuple[object, ...]] = {
                **dict.fromkeys(("own", "earlier"), (text,)),
                "group": (text.group,),
                "step": ("step",),
                "all": (text.group, "step"),
            }
            self.written[text] = [shared[scope] for scope in scopes[source]]
            old = [earlier[text.prompt]] if source in _READ_EARLIER else []
            self.read[text] = [*self.written[text], *old]
        lengths = sorted(int(text.sampled.sum()) for text in step)
        long = lengths[-max(1, len(lengths) // 10)] if lengths else 0
        self.tail = {text for text in step if int(text.sampled.sum()) >= long}

    def run(self) -> None:
        """Decode all to their ends."""
        for text in self.step:
            self._advance(text, text.start)
        while running := [text for text in self.step if text.known < text.tokens]:
            # every draft is made before any token of this decoding step is known
            drafted = [(text, *self._draft(text)) for text in running]
            for text, length, match in drafted:
                self._accept(text, length, match)

    def _draft(self, text: Text) -> tuple[int, Match | None]:
        """The number of drafted tokens, and their source."""
        found = [match for index in self.read[text] if (match := index.find(text))]
        best = max(found, key=lambda match: match.length, default=None)  # the first of equals
        if best is None:
            return 0, None
        return min(self.measured.draft_tokens, best.text.known - best.end), best

    def _accept(self, text: Text, drafted: int, match: Match | None) -> None:
        """The last token of a turn counts as the free one, drafted or not."""
        accepted, here = 0, text.known
        while (
            match is not None
            and accepted < drafted
            and here + accepted + 1 < text.tokens
            and text.sampled[here + accepted + 1]
            and match.text.piece(match.end + accepted, match.end + accepted + 1)
            == text.piece(here + accepted, here + accepted + 1)
        ):
            accepted += 1
        measured = self.measured
        position = max(each for each in POSITIONS if each <= here - text.start)
        parts = [measured.total, measured.by_position[position]]
        parts.append(measured.by_origin[_origin(text, match)])
        if text in self.tail:
            parts.append(measured.tail)
        for counts in parts:
            counts.add(drafted, accepted)
        self._advance(text, here + accepted + 1)

    def _advance(self, text: Text, known: int) -> None:
        """Append accepted tokens, and the tool output after them, to the known ones."""
        while known < text.tokens and not text.sampled[known]:
            known += 1
        for index in self.written[text]:
            index.add(text, text.known, known)
        text.known = known


def _origin(text: Text, match: Match | None) -> str:
    if match is None:
        return "none"
    if match.text is text:
        return "own"
    if match.text.step != text.step:
        return "earlier"
    return "sibling" if match.text.group == text.group else "other prompt"


def speculation_text(
    run: Path, draft_tokens: Sequence[int], longest: int, newest: int, recipe: str
) -> str:
    """The tables of the command. UserError: the run has no records."""
    steps = _recorded(run, newest)
    results = [
        measure(steps, source, count, longest) for source in SOURCES for count in draft_tokens
    ]
    first = results[0].total
    head = f"{run}: {len(steps)} steps, {sum(map(len, steps))} sequences, {first.tokens} tokens"
    most = max(results, key=lambda each: (each.total.accept_length, -each.draft_tokens))
    return "\n\n".join(
        [
            f"{head} of the policy; suffixes of 1 to {longest} tokens",
            aligned(_planned_rows(results, recipe)),
            f"source {most.source}, {most.draft_tokens} draft tokens:",
            aligned(_part_rows("position from", most.by_position)),
            aligned(_part_rows("draft from", most.by_origin)),
        ]
    )


def _recorded(run: Path, newest: int) -> list[list[Text]]:
    directory = records_directory(run)
    numbers = recorded_steps(directory)[-newest:]
    if not numbers:
        raise UserError(
            f"{run} has no records of rollouts; train with run.record=all or replayable"
        )
    heads = [read_head(directory, number) for number in numbers]
    return [texts(recorded_groups(directory, head), head.step) for head in heads]


def _planned_rows(results: Sequence[Measured], recipe: str) -> list[list[str]]:
    """Accept lengths, and the plan of a recipe whose rollouts had them."""
    config, cluster = find_recipe(recipe), cluster_of(recipe)
    assert cluster is not None, "the command checks the recipe"

    def planned(drafts: Drafts) -> tuple[float, float, float]:
        plan = make_plan(config, cluster, drafts=drafts)
        if plan.serving is None:
            raise UserError(f"--recipe {recipe} samples without servers; give another recipe")
        return plan.serving.seconds, plan.seconds, plan.serving.tokens_a_second

    plain = planned(NO_DRAFTS)
    even = {
        count: plain[2] / planned(Drafts(count))[2]
        for count in {each.draft_tokens for each in results}
    }
    rows = [
        ["source", "draft tokens", "accepted", "accept length", "of long ones", "break-even"],
        ["none", "0", "", "1.00", "1.00", ""],
    ]
    rows[0] += [f"{recipe}: rollouts [s]", "step [s]"]
    rows[1] += [f"{plain[0]:.0f}", f"{plain[1]:.0f}"]
    for each in results:
        total, count = each.total, each.draft_tokens
        seconds = planned(Drafts(count, total.accept_length))
        rows.append(
            [each.source, str(count), f"{total.accepted / max(1, total.drafted):.0%}"]
            + [f"{value:.2f}" for value in (total.accept_length, each.tail.accept_length)]
            + [f"{even[count]:.2f}", f"{seconds[0]:.0f}", f"{seconds[1]:.0f}"]
        )
    return rows


def _part_rows(name: str, parts: Mapping[Any, Counts]) -> list[list[str]]:
    rows = [[name, "decoding steps", "accept length"]]
    for key, counts in sorted(parts.items()):
        rows.append([str(key), str(counts.steps), f"{counts.accept_length:.2f}"])
    return rows
