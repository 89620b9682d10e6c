"""The words that this project no longer uses, and what it says instead.

    python -m tools.vocabulary megatron_stare docs README.md

prints each place as `file:line: word -> replacement`. tests/tools/test_vocabulary.py holds the
whole repository to the list, tools/code_metrics.py counts by it.

Identifiers are split into words first (`_open_flights`, `OpenFlights` -> "open flights"), so that
one pattern covers code and prose. A pattern leaves out the honest uses of its word.
"""

from __future__ import annotations

import bisect
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CHECKED = (
    *("megatron_stare", "docs", "README.md", "CONTRIBUTING.md"),
    *("examples", "slurm", "tools", "benchmarks", "tests", "megatron_stare_agents"),
)
ENDINGS = {".py", ".md", ".sh", ".sbatch", ""}
UNCHECKED = {  # they have to name the words
    "tools/vocabulary.py",
    "tests/tools/test_vocabulary.py",
    "tests/tools/test_code_metrics.py",
}
IN_TESTS = {"twin", "twins"}  # naive references, which tests compare with

# A pattern over split words, where one space stands for any white space -> what to write instead.
RETIRED = {
    r"outlines?": "RolloutMeta",
    r"(?<!in )(?<!in-)flights?": "InflightRequest",
    r"askers?": "waiting clients",
    r"seats?": "ServerPlacement",
    r"spoilt": "invalid",
    r"put by|puts by|putting by": "buffered, stored",
    r"(?<!process-)(?<!half-)(?<!process )(?<!half )life": "attempt",
    r"lives(?! (in|on|at|until|as)\b)": "attempt",
    r"incarnations?": "attempt",
    r"told|tells|telling|(?<!\.)(?<!def )(?<!\{)tell(?!\()": "broadcast, sent, says, shows",
    r"dealt out": "scattered",
    r"anew": "again",
    r"whoever": "any caller, any process",
    r"so many": "N, a number of",
    r"(go|goes|gone|going|went) on": "continues, resumes",
    r"(?<!leave )(?<!leaves )(?<!left )(?<!lags )(?<!lag )(?<!falls )(?<!fall )(?<!steps )behind"
    r"(?! (an?|the|one) (proxy|router|firewall|load balancer|protocol|interface|view|flag))"
    r"(?! (http|it all))": "after, following",
    r"beside": "next to, in addition to",
    r"settles?|settled|settling": "wait, finish, decide",
    r"halts?|halted|halting": "stop",
    r"company|companies": "process group",
    r"no one(?! (of|else's)\b)": "no process, no caller",
    r"(?-i:[Nn]obody)": "no process, no caller",
    r"(?<!float64 )(?<!naive )twins?": "baseline",
    r"mirrors?(?! (grid|the|image))(?!-grid)|mirrored": "tracker, weight relay, pool replica",
    r"producers?": "RolloutBuffer",
}
# Names that a definition may no longer have; as ordinary words they stay.
RETIRED_NAMES = {
    r"class (?:_?(?:Known|Again|Word|Holding|Reach|Round)|\w*(?<=[a-z_])Share)\b": "design.md",
    r"def (?:begin|halt|settle|advance|take)\b": "start, stop, wait, step, next",
}
_WORDS = [
    (re.compile(rf"(?<![\w-])(?:{pattern})(?!\w)", re.IGNORECASE), instead)
    for pattern, instead in RETIRED.items()
]
_NAMES = [(re.compile(pattern), instead) for pattern, instead in RETIRED_NAMES.items()]


class RetiredWord(NamedTuple):
    """One place that uses a retired word."""

    line: int
    word: str
    instead: str


def retired_words(text: str) -> list[RetiredWord]:
    """Every use of a retired word in a file's text, in the order of its lines."""
    lines = [_words_of(line) for line in text.splitlines()]
    ends = list(itertools.accumulate(len(line) + 1 for line in lines))
    joined = " ".join(lines)  # a phrase may be broken over two lines
    found = [
        RetiredWord(bisect.bisect(ends, match.start()) + 1, match[0], instead)
        for pattern, instead in _WORDS
        for match in pattern.finditer(joined)
    ]
    for number, line in enumerate(text.splitlines(), start=1):
        found += [
            RetiredWord(number, match[0], instead)
            for pattern, instead in _NAMES
            for match in pattern.finditer(line)
        ]
    return sorted(found)


def retired_words_of(file: Path) -> list[RetiredWord]:
    """The retired words of a file of this checkout; tests may use the words of IN_TESTS."""
    allowed = IN_TESTS if file.is_relative_to(ROOT / "tests") else set()
    found = retired_words(file.read_text(encoding="utf-8"))
    return [each for each in found if each.word.lower() not in allowed]


def _words_of(line: str) -> str:
    """The line without indent and comment sign, its identifiers split into words."""
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", line).replace("_", " ")
    return re.sub(r"\s+", " ", split).strip("#>* ")


def checked_files(root: Path, places: Sequence[str] = CHECKED) -> Iterator[Path]:
    """The text files below the named files and folders of a checkout."""
    for place in places:
        path = root / place
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and _is_checked(file.relative_to(root)):
                yield file


def _is_checked(file: Path) -> bool:
    hidden = any(part.startswith(".") or part == "__pycache__" for part in file.parts)
    return file.suffix in ENDINGS and not hidden and str(file) not in UNCHECKED


def main(places: Sequence[str]) -> int:
    found = 0
    for file in checked_files(ROOT, places or CHECKED):
        for line, word, instead in retired_words_of(file):
            print(f"{file.relative_to(ROOT)}:{line}: {word} -> {instead}")
            found += 1
    print(f"{found} retired words")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
