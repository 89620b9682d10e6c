"""Responses made to break a verifier. The label is 4 throughout."""

from __future__ import annotations

import random
from collections.abc import Callable

_SYMBOLS = [
    "\\frac",
    "{",
    "}",
    "\\sqrt",
    "^",
    "_",
    "\\left(",
    "\\right)",
    "$",
    "\\boxed{",
    "\x00",
    "\u202e",
    "\\",
    "&",
]


def _unclosed(rng: random.Random) -> str:
    return "so \\boxed{" + "\\frac{1}{" * rng.randint(1, 3) + "4" + "}" * rng.randint(0, 2)


def _too_many_closed(rng: random.Random) -> str:
    return "\\boxed{4" + "}" * rng.randint(2, 3000)


def _long_sum(rng: random.Random) -> str:
    return "\\boxed{" + "+".join(["1"] * 50_000) + "}"


def _long_digits(rng: random.Random) -> str:
    return rng.choice(["\\boxed{%s}", "Answer: %s", "it is %s"]) % (
        str(rng.randint(1, 9)) * 100_000
    )


def _long_letters(rng: random.Random) -> str:
    return "$" + rng.choice("xyz\u4e2d") * 100_000 + "$"


def _almost_too_long(rng: random.Random) -> str:
    return "\\boxed{" + "+".join(rng.choices("xyz567", k=rng.randint(3, 8))) + "}"


def _many_boxes(rng: random.Random) -> str:
    return "\\boxed{" * rng.randint(100, 20_000)


def _nested_roots(rng: random.Random) -> str:
    depth = rng.choice([3, 10, 400, 5000])
    return "\\boxed{" + "\\sqrt{" * depth + "2" + "}" * depth + "}"


def _brackets(rng: random.Random) -> str:
    depth = rng.choice([100, 900, 2500, 50_000])
    return "\\boxed{" + "(" * depth + "1" + ")" * depth + "}"


def _unicode(rng: random.Random) -> str:
    return (
        "\\boxed{"
        + "".join(chr(rng.choice([rng.randrange(32, 0xD800), 0x1F600, 0x661])) for _ in range(60))
        + "}"
    )


def _nul(rng: random.Random) -> str:
    return rng.choice(["\\boxed{\x00}", "\\boxed{4\x00}", "\x00" * 5000, "Answer: \x004"])


def _surrogates(rng: random.Random) -> str:
    return "\\boxed{\ud800" + "\udfff" * rng.randint(1, 9) + "}"


def _soup(rng: random.Random) -> str:
    return "".join(rng.choices(_SYMBOLS, k=rng.randint(5, 300)))


def _dollars(rng: random.Random) -> str:
    return "$" * rng.randint(1, 5000) + "4"


def _division_by_zero(rng: random.Random) -> str:
    return rng.choice(
        [
            "\\boxed{1/0}",
            "\\boxed{\\frac{4}{0}}",
            "\\boxed{0^{-4}}",
            "\\boxed{\\log 0}",
            "\\boxed{4\\%%}",
        ]
    )


def _nothing(rng: random.Random) -> str:
    return rng.choice(
        ["", " ", "\n" * 9999, "Answer:", "\\boxed{}", "\\boxed", "<answer></answer>"]
    )


def _tables(rng: random.Random) -> str:
    return "\\boxed{\\begin{pmatrix}" + "&".join("1" * 300) + "\\\\" * 200 + "\\end{pmatrix}}"


def _commas(rng: random.Random) -> str:
    return "\\boxed{" + "1," * rng.randint(1, 900) + "}"


# These may crash a process, so each is in the list once.
EXPLOSIVE = [
    "\\boxed{9^{9^{9^9}}}",
    "9^9^9^9",
    "\\boxed{9^9^9^9}",
    "\\boxed{9**9**9**9}",
    "\\boxed{(10^{10})^{10^{10}}}",
    "\\boxed{100000000!}",
    "\\boxed{((9!)!)!}",
    "\\boxed{" + "\\frac{1}{" * 180 + "2" + "}" * 180 + "}",
    "\\boxed{\\binom{10^9}{5\\cdot 10^8}}",
    "\\boxed{" + "(1+" * 200 + "1" + ")" * 200 + "}",
    "\\boxed{" + "\\frac{1}{" * 25,
    "\\boxed{\\sum_{k=1}^{10^9} \\frac{1}{k^k}}",
    "\\boxed{(x+1)^{1000000} - (x+2)^{999999}}",
    "\\boxed{2^{-10^{12}}}",
    "\\boxed{\\int_0^{1} x^{x^{x}} dx}",
]
_KINDS: list[Callable[[random.Random], str]] = [
    *(
        _unclosed,
        _too_many_closed,
        _long_sum,
        _long_digits,
        _long_letters,
        _almost_too_long,
        _many_boxes,
    ),
    *(
        _nested_roots,
        _brackets,
        _unicode,
        _nul,
        _surrogates,
        _soup,
        _dollars,
        _division_by_zero,
        _nothing,
    ),
    *(_tables, _commas),
]


def hostile_responses(count: int, explosive: int) -> list[str]:
    """Always the same ones: the first explosive ones, then equally many of every kind."""
    rng = random.Random(7)
    return EXPLOSIVE[:explosive] + [
        _KINDS[number % len(_KINDS)](rng) for number in range(count - explosive)
    ]
