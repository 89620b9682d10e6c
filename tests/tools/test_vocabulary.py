"""No retired word (tools/vocabulary.py) in the package, the docs, the scripts and the tests."""

from __future__ import annotations

import pytest

from tests.paths import ROOT
from tools.vocabulary import CHECKED, checked_files, retired_words, retired_words_of

FILES = list(checked_files(ROOT))


@pytest.mark.parametrize("place", CHECKED)
def test_no_retired_words(place):
    files = [file for file in FILES if file.relative_to(ROOT).is_relative_to(place)]
    assert files
    found = [
        f"{file.relative_to(ROOT)}:{line}: {word} -> {instead}"
        for file in files
        for line, word, instead in retired_words_of(file)
    ]
    assert not found, "\n".join(found)


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
def test_retired_words_are_found(text, words):
    assert [found.word for found in retired_words(text)] == words
