"""No retired word (tools/vocabulary.py) in the package, the docs and the scripts."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.paths import ROOT
from tools.vocabulary import CHECKED, checked_files, retired_words

# Rooms that are not clean yet, and how many retired words each may have at most.
REMAINING: dict[str, int] = {
    "benchmarks": 64,
    "docs": 6,
    "megatron_stare/commands": 6,
    "megatron_stare/debug": 8,
    "megatron_stare/loop": 75,
    "megatron_stare/losses": 6,
    "megatron_stare/sync": 90,
    "tools": 34,
}


def room_of(file: str) -> str:
    parts = file.split("/")
    return "/".join(parts[:2]) if parts[0] == "megatron_stare" else parts[0]


FILES = [str(file.relative_to(ROOT)) for file in checked_files(ROOT)]


@pytest.mark.parametrize("room", sorted({room_of(file) for file in FILES}))
def test_no_retired_words(room):
    found = [
        f"{file}:{line}: {word} -> {instead}"
        for file in FILES
        if room_of(file) == room
        for line, word, instead in retired_words((ROOT / file).read_text(encoding="utf-8"))
    ]
    assert len(found) <= REMAINING.get(room, 0), "\n".join(found)


def test_every_place_is_checked_and_only_rooms_that_exist_are_excused():
    counted = Counter(file.split("/")[0] for file in FILES)
    assert not [place for place in CHECKED if not counted[place]]
    assert REMAINING.keys() <= {room_of(file) for file in FILES}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("class OwnShare:", ["class OwnShare"]),
        ("self._open_flights = 3", ["flights"]),
        ("requests in flight, in-flight requests, IN_FLIGHT, inflight", []),
        ("it goes\n    # on behind the server", ["goes on", "behind"]),
        ("a server behind a proxy; files left behind", []),
        ("a float64 twin of the sum; its twin", ["twin"]),
        ("tests mirror the tree; the mirror-grid task; reward=mirror_grid", []),
        ("def begin(self) -> None:", ["def begin"]),
        ("no one of them; no one asks", ["no one"]),
        ("kernel.NOBODY; nobody asks", ["nobody"]),
        ("file.tell(); def tell(self); it tells the rank", ["tells"]),
        ("lifetime, process-lifetime, lives in a folder; the run's lives", ["lives"]),
        ("besides, companion, again, known, share of tokens, in other words", []),
        ("| anew |\n| so\nmany |", ["anew", "so many"]),
    ],
)
def test_what_counts_as_a_retired_word(text, words):
    assert [found.word for found in retired_words(text)] == words
