"""The rule by which SGLang verifies deterministic drafts, against the target's distribution.

The rule has no draft probabilities (speculative sampling, arXiv 2211.17192, with a drafter that is
certain; over a tree, arXiv 2305.09781). One uniform number is compared with the summed
probabilities of a node's children: the first child whose sum exceeds it is accepted, and its own
children follow. If there is none, a token is sampled from what the children leave of the
distribution. `threshold` is SGLang's --speculative-accept-threshold-acc.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy
import pytest

from megatron_stare.debug.speculation import measure, texts
from megatron_stare.records import Group, Prompt, Rollout

VOCABULARY, PROMPT = 4, (0, 1, 2, 3, 0, 1)
_DICE = numpy.random.default_rng(0)
# the next token's probabilities after each pair of tokens
TARGET = _DICE.dirichlet(numpy.full(VOCABULARY, 0.7), (VOCABULARY, VOCABULARY))
Tree = dict[int, "Tree"]  # children, in order, each with its own
Step = Callable[[Sequence[int], Tree, numpy.random.Generator], list[int]]


def target(known: Sequence[int]) -> numpy.ndarray:
    row: numpy.ndarray = TARGET[known[-2], known[-1]]
    return row


def sampled(weights: numpy.ndarray, dice: numpy.random.Generator) -> int:
    sums = weights.cumsum()
    return int(numpy.searchsorted(sums, dice.random() * sums[-1], side="right"))


def verified(
    known: Sequence[int], tree: Tree, dice: numpy.random.Generator, threshold: float = 1.0
) -> list[int]:
    """The tokens of one decoding step: the accepted drafts and the free token after them."""
    tokens: list[int] = []
    while True:
        weights = target([*known, *tokens])
        coin, reached = dice.random(), 0.0
        for child in tree:
            reached += weights[child]
            if coin < reached / threshold:
                break
        else:
            left = weights.copy()
            left[list(tree)] = 0
            return [*tokens, sampled(left, dice)]
        tokens.append(child)
        tree = tree[child]


def likeliest(known: Sequence[int], tree: Tree, _: numpy.random.Generator) -> list[int]:
    """The rule of servers without a GPU at any temperature."""
    tokens: list[int] = []
    while True:
        best = int(target([*known, *tokens]).argmax())
        tokens.append(best)
        if best not in tree:
            return tokens
        tree = tree[best]


def loose(known: Sequence[int], tree: Tree, dice: numpy.random.Generator) -> list[int]:
    return verified(known, tree, dice, threshold=0.8)


def chain(known: Sequence[int], longest: int = 3, draft_tokens: int = 2) -> Tree:
    """The tokens after the latest earlier place of the longest known suffix."""
    for length in range(min(longest, len(known)), 0, -1):
        for end in range(len(known) - 1, length - 1, -1):
            if known[end - length : end] == known[len(known) - length :]:
                tree: Tree = {}
                for token in reversed(known[end : end + draft_tokens]):
                    tree = {token: tree}
                return tree
    return {}


def bush(known: Sequence[int]) -> Tree:
    """A tree of two levels that depends on the known tokens alone."""
    dice = numpy.random.default_rng(list(known))

    def children(count: int) -> list[int]:
        return dice.permutation(VOCABULARY)[:count].tolist()

    return {child: {below: {} for below in children(2)} for child in children(3)}


def response(
    step: Step, drafter: Callable[[list[int]], Tree], tokens: int, dice: numpy.random.Generator
) -> tuple[list[int], int]:
    """A response, and the decoding steps that it took."""
    known, steps = list(PROMPT), 0
    while len(known) < len(PROMPT) + tokens:
        known += step(known, drafter(known), dice)
        steps += 1
    return known[len(PROMPT) :][:tokens], steps


def chi_square(step: Step, drafter: Callable[[list[int]], Tree], draws: int = 12_000) -> float:
    """Chi-square of the first three tokens, in standard deviations above its mean; the 64 outcomes
    have 63 degrees of freedom.
    """
    dice, counts = numpy.random.default_rng(1), numpy.zeros((VOCABULARY,) * 3)
    for _ in range(draws):
        counts[tuple(response(step, drafter, 3, dice)[0])] += 1
    wanted = numpy.zeros_like(counts)
    for each in itertools.product(range(VOCABULARY), repeat=3):
        known = [*PROMPT, *each]
        wanted[each] = draws * numpy.prod(
            [target(known[: len(PROMPT) + n])[each[n]] for n in range(3)]
        )
    freedom = counts.size - 1
    statistic = float(((counts - wanted) ** 2 / wanted).sum())
    return (statistic - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize("drafter", [chain, bush])
def test_accepted_drafts_follow_the_target(drafter: Callable[[list[int]], Tree]) -> None:
    assert chi_square(verified, drafter) < 4
    for inexact in (loose, likeliest):
        assert chi_square(inexact, drafter) > 20, inexact.__name__


def statistic_z(responses: Sequence[list[int]]) -> float:
    """docs/exactness.md, in float64."""
    gap = variance = 0.0
    for ids in responses:
        known = [*PROMPT, *ids]
        for n, token in enumerate(ids):
            weights = target(known[: len(PROMPT) + n])
            surprisals = -numpy.log(weights)
            entropy = float(weights @ surprisals)
            gap += surprisals[token] - entropy
            variance += float(weights @ (surprisals - entropy) ** 2)
    return gap / variance**0.5


def test_z_is_standard_normal_under_the_rule_and_finds_inexact_sampling() -> None:
    def batches(step: Step, count: int) -> list[float]:
        """z of batches of 1,200 tokens."""
        dice = numpy.random.default_rng(2)
        return [
            statistic_z([response(step, chain, 20, dice)[0] for _ in range(60)])
            for _ in range(count)
        ]

    exact = batches(verified, 100)
    assert abs(numpy.mean(exact)) < 0.4 and 0.75 < numpy.std(exact) < 1.25
    assert numpy.mean(batches(likeliest, 3)) < -20
    assert numpy.mean(batches(loose, 30)) < -1.5


def test_the_rule_accepts_as_many_drafts_as_the_offline_replay_counts() -> None:
    """The replay draws no coins: it compares drafts with tokens that were sampled without any."""
    dice, count, tokens = numpy.random.default_rng(3), 400, 30
    drafted = [response(verified, chain, tokens, dice)[1] for _ in range(count)]
    plain = []
    for _ in range(count):
        ids, _ = response(verified, lambda known: {}, tokens, dice)
        rollout = Rollout(
            ids, [-1.0] * tokens, [True] * tokens, status="completed", weight_version=0
        )
        group = Group(Prompt(0, PROMPT, ""), (rollout,))
        plain.append(measure([texts([group], 0)], "own", 2, 3).total.steps)
    error = ((numpy.var(drafted) + numpy.var(plain)) / count) ** 0.5
    assert abs(numpy.mean(drafted) - numpy.mean(plain)) < 4 * error
    assert 1.2 * numpy.mean(plain) < tokens, "drafts are accepted"
