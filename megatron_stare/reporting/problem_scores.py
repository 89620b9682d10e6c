"""The numbers of an evaluation (avg@k, pass@k, majority@k, intervals) from judged responses.

A problem has n responses; a number at k <= n is the mean over all subsets of k of them, computed in
closed form, and a set's number is the mean over its problems. Intervals are over problems: the
choice of a set's problems is what is random.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy

EVALUATION = "evaluation"  # a directory of a run
# With more responses majority@k is computed for k = n only: the sums over subsets would overflow
# 64-bit integers.
MOST_SUBSET_VOTES = 64
RESAMPLES, _AT_ONCE = 2000, 16


def responses_directory(run: Path, step: int) -> Path:
    """The responses of the evaluation after this step: a directory for each set."""
    return run / EVALUATION / "responses" / f"step_{step:08d}"


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """1 - C(n-c, k) / C(n, k): the chance that k of n samples, drawn without replacement, contain a
    correct one.

    Unbiased for pass@k when the n samples are independent (Chen et al. 2021, arXiv:2107.03374,
    section 2.1).
    """
    _check_counts(samples, correct)
    if not 1 <= k <= samples:
        raise ValueError(
            f"pass@k: k={k} must lie in [1, {samples}], the number of samples per problem"
        )
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def average_keys(metrics: Iterable[str]) -> list[str]:
    """The avg@k keys of a step's metrics, one for each evaluation set."""
    return [key for key in metrics if key.startswith("eval/") and key.endswith("/avg_at_k")]


def evaluation_sets(metrics: Iterable[str]) -> list[str]:
    """The evaluation sets that these keys name, each once."""
    return list(dict.fromkeys(key.split("/")[1] for key in metrics if key.startswith("eval/")))


def start_key(key: str) -> str:
    """The name of an evaluation's metric where it is of the policy before the first step; any other
    key stays.
    """
    return key.replace("eval/", "eval_start/", 1) if key.startswith("eval/") else key


def avg_at_k(samples: int, correct: int) -> float:
    """c / n: the accuracy of one problem over its n samples."""
    _check_counts(samples, correct)
    return correct / samples


def _check_counts(samples: int, correct: int) -> None:
    if samples < 1 or not 0 <= correct <= samples:
        raise ValueError(f"{correct} correct of {samples} samples is impossible")


@dataclass(frozen=True)
class Response:
    """One response, reduced to the values that the metrics need."""

    verdict: str
    answer: int | None  # index into the problem's answers; None: no answer, and so no vote
    tokens: int
    truncated: bool
    reflections: int


@dataclass(frozen=True)
class Problem:
    """One problem and its responses."""

    index: int
    text: str
    label: str
    copies: int  # how often its row occurs in the data
    answers: tuple[str, ...]  # the distinct answers as they were written
    responses: tuple[Response, ...]

    @property
    def correct(self) -> int:
        return sum(response.verdict == "correct" for response in self.responses)

    @property
    def votes(self) -> tuple[tuple[int, bool], ...]:
        """(number of responses, right) of each answer; right if one of them was judged correct."""
        counts = Counter(response.answer for response in self.responses)
        right = {response.answer for response in self.responses if response.verdict == "correct"}
        return tuple((counts[number], number in right) for number in range(len(self.answers)))

    def majority(self, k: int) -> float:
        """majority@k of this problem."""
        votes = self.votes
        return majority_at_k(votes, len(self.responses) - sum(count for count, _ in votes), k)


@lru_cache(maxsize=65536)
def majority_at_k(votes: tuple[tuple[int, bool], ...], silent: int, k: int) -> float:
    """The chance that the answer with most votes among k of n responses is right.

    A tie counts as the fraction of its answers that are right.

    votes: (responses, right) of each answer; `silent` responses gave none. n is the sum of all; a
    subset of silent ones is wrong. Exact: the sum, over a right answer's votes t and the number s
    of others that tie with it, of C(c, t) * ways(k - t, s) / ((s + 1) * C(n, k)), others having at
    most t. For n > 64, k must be n.
    ValueError: k outside [1, n].
    """
    samples = sum(count for count, _ in votes) + silent
    if not 1 <= k <= samples or (samples > MOST_SUBSET_VOTES and k != samples):
        raise ValueError(f"majority@k: k={k} with {samples} responses")
    if k == samples:
        most = max((count for count, _ in votes), default=0)
        tied = [right for count, right in votes if count == most]
        return sum(tied) / len(tied) if tied else 0.0
    total = 0.0
    for place, (count, right) in enumerate(votes):
        others = [other for number, (other, _) in enumerate(votes) if number != place]
        for given in range(1, min(count, k) + 1) if right else ():
            ways = _ways(others, silent, given, k - given)
            shared = float((ways / numpy.arange(1, len(ways) + 1)).sum())
            total += math.comb(count, given) * shared
    return total / math.comb(samples, k)


def _ways(others: Sequence[int], silent: int, limit: int, left: int) -> Any:
    """[s] -> ways to take `left` responses from other answers and silent ones, with s answers at
    `limit` and none above it.
    """
    ways = numpy.zeros((left + 1, len(others) + 1), dtype=numpy.int64)
    ways[:, 0] = [math.comb(silent, taken) for taken in range(left + 1)]
    for count in others:
        grown = ways.copy()
        for taken in range(1, min(count, limit, left) + 1):
            added = math.comb(count, taken) * ways[: left + 1 - taken]
            if taken == limit:
                grown[taken:, 1:] += added[:, :-1]
            else:
                grown[taken:] += added
        ways = grown
    return ways[left]


def bootstrap_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float] | None:
    """The 95% percentile interval of the mean over resampled problems (Efron 1979);
    None for fewer than two.
    """
    if len(values) < 2:
        return None
    count, table = len(values), numpy.asarray(values)
    random = numpy.random.default_rng((seed, count))
    means = [
        # a few resamples at a time: all of a large set would take gigabytes
        table[random.integers(count, size=(min(_AT_ONCE, RESAMPLES - first), count))].mean(axis=1)
        for first in range(0, RESAMPLES, _AT_ONCE)
    ]
    low, high = numpy.percentile(numpy.concatenate(means), [2.5, 97.5])
    return float(low), float(high)


def count_reflections(text: str, words: Sequence[str]) -> int:
    """The number of times that any of the words or phrases stands in a text, whole and in either
    case.
    """
    if not words:
        return 0
    pattern, beginnings = _reflection_pattern(tuple(words))
    folded = text.casefold()
    if len(folded) != len(text):  # positions in the two texts differ
        return len(pattern.findall(text))
    # Searching the first words by str.find is several times as fast as the pattern alone.
    count = end = 0
    for place in sorted({place for each in beginnings for place in _places(each, folded)}):
        match = pattern.match(text, place) if place >= end else None
        if match:
            count, end = count + 1, match.end()
    return count


@lru_cache(maxsize=16)
def _reflection_pattern(words: tuple[str, ...]) -> tuple[re.Pattern[str], list[str]]:
    """A pattern that matches any of the words, and their first words, case-folded."""
    phrases = (
        r"\s+".join(map(re.escape, word.split())) for word in sorted(words, key=len, reverse=True)
    )
    pattern = re.compile(rf"(?<!\w)(?:{'|'.join(phrases)})(?!\w)", re.IGNORECASE)
    return pattern, sorted({word.split()[0].casefold() for word in words})


def _places(part: str, text: str) -> Iterator[int]:
    place = text.find(part)
    while place >= 0:
        yield place
        place = text.find(part, place + 1)


def ks(samples: int) -> list[int]:
    """1, 2, 4, ... and the number of samples."""
    return sorted(
        {1 << power for power in range(samples.bit_length()) if 1 << power <= samples} | {samples}
    )


def set_metrics(problems: Sequence[Problem], seed: int) -> dict[str, float]:
    """All numbers of one set; majority_* and no_answer_fraction need a response with an answer."""
    n = len(problems[0].responses)
    responses = [response for problem in problems for response in problem.responses]
    metrics: dict[str, float] = {"k": n, "problems": len(problems)}
    metrics |= _rate("avg_at_k", [avg_at_k(n, problem.correct) for problem in problems], seed)
    metrics |= _rate("pass_at_k", [pass_at_k(n, problem.correct, n) for problem in problems], seed)
    metrics |= {
        f"pass_at_{k}": fmean([pass_at_k(n, problem.correct, k) for problem in problems])
        for k in ks(n)
    }
    if any(response.answer is not None for response in responses):
        metrics |= _rate("majority_at_k", [problem.majority(n) for problem in problems], seed)
        voting = ks(n) if n <= MOST_SUBSET_VOTES else [n]
        metrics |= {
            f"majority_at_{k}": fmean([problem.majority(k) for problem in problems]) for k in voting
        }
        metrics["no_answer_fraction"] = fmean([response.answer is None for response in responses])
    metrics["response_length"] = fmean([response.tokens for response in responses])
    for verdict in ("correct", "wrong"):
        lengths = [response.tokens for response in responses if response.verdict == verdict]
        if lengths:
            metrics[f"response_length_{verdict}"] = fmean(lengths)
    metrics["truncated_fraction"] = fmean([response.truncated for response in responses])
    metrics["reflections"] = fmean([response.reflections for response in responses])
    metrics["unverifiable"] = float(
        sum(response.verdict == "unverifiable" for response in responses)
    )
    return metrics


def problem_row(name: str, problem: Problem) -> dict[str, Any]:
    """One line of problems.jsonl."""
    n, votes = len(problem.responses), problem.votes
    return {
        "set": name,
        "index": problem.index,
        "prompt": problem.text,
        "label": problem.label,
        "copies": problem.copies,
        "k": n,
        "correct": problem.correct,
        "wrong": sum(response.verdict == "wrong" for response in problem.responses),
        "unverifiable": sum(response.verdict == "unverifiable" for response in problem.responses),
        "pass_at_k": {str(k): pass_at_k(n, problem.correct, k) for k in ks(n)},
        "majority_at_k": problem.majority(n) if votes else None,
        "answers": [
            {"answer": answer, "responses": count, "right": right}
            for answer, (count, right) in zip(problem.answers, votes, strict=True)
        ],
        "response_length": fmean([response.tokens for response in problem.responses]),
        "truncated": sum(response.truncated for response in problem.responses),
        "reflections": sum(response.reflections for response in problem.responses),
    }


def _rate(name: str, values: Sequence[float], seed: int) -> dict[str, float]:
    interval = bootstrap_interval(values, seed)
    found = {name: fmean(values)}
    return found | ({f"{name}_low": interval[0], f"{name}_high": interval[1]} if interval else {})
