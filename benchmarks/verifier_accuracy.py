"""Answers that the math verifier accepts: right ones in ten written forms, wrong ones, answers that
have not been worked out, formulas copied from the problem, and expressions made to blow up.

    python benchmarks/verifier_accuracy.py [--tree PATH] [--labels 40] [--no-bombs] [--json PATH]

Eight label sets: the six problem sets of --data, and two written here in the style of others:
`science` (numbers with powers of ten, as OCW courses and Minerva's set have them) and `ranges`
(intervals, empty and infinite sets). Per set, --labels labels (evenly spaced) in ten forms each,
and 100 wrong answers, none of which has the label's value. `unevaluated` are 100 expressions of
the right value that leave the computing to the reader, for labels that are integers. `copied`
counts the problems for which some formula of the problem's own text, put in a box, scores, although
it is not written as the label is. --tree measures another checkout of this repository.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow.parquet
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
MODULES = ("megatron_stare.scoring.mathematics.answers", "megatron_stare.scoring.math_answers")
WRONG = 100
WORDS = ("correct", "wrong", "unverifiable")
SCIENCE = (
    *("4.5e33", "3.83e35", "8.7e8", "6e13", "1.2e-5", "4.83e7", "2.75e11", "1.6e-19", "7.5e-7"),
    *("3e8", "6.67e-11", "9.1e-31", "1.5e11", "8.854e-12", "5.97e24", "2e30", "4e-7", "1.38e-23"),
    *("6.02e23", "3.3e-4"),
)
RANGES = (
    *("(2,\\infty)", "[3,\\infty)", "(-\\infty,0]", "(-\\infty,-4)", "(3,4]", "[-2,7]"),
    *("(5,\\infty)", "(-\\infty,2)\\cup(3,\\infty)", "(-\\infty,1]\\cup[6,\\infty)", "[0,9)"),
    *("(-1,6)", "\\emptyset", "(-\\infty,\\infty)", "[\\frac{1}{2},\\infty)", "(-8,\\infty)"),
    *("(-\\infty,\\frac{7}{3})", "(0,12]", "[11,\\infty)", "(-\\sqrt{3},\\sqrt{3})", "[1,5]"),
)
BOMBS = (
    "9^{9^{9^9}}",
    "((9!)!)!",
    "\\binom{10^9}{5\\cdot 10^8}",
    "(x+1)^{1000000} - (x+2)^{999999}",
    "\\sum_{k=1}^{10^9} \\frac{1}{k^k}",
)


def bare(label: str) -> str:
    match = re.fullmatch(r"\\boxed\{(.*)\}", label.strip())
    return (match[1] if match else label).strip()


def number(text: str) -> Fraction | None:
    """An integer, decimal, simple fraction or 4.5e33, read independently of the verifier."""
    plain = re.sub(r"\\[!$]|(?<=\d),(?=\d{3})", "", text.replace("\\dfrac", "\\frac"))
    match = re.fullmatch(r"(-?)\\frac\{?(\d+)\}?\{?(\d+)\}?", plain)
    if match:
        return Fraction(int(match[1] + match[2]), int(match[3]))
    return Fraction(plain) if re.fullmatch(r"-?\d*\.?\d+(e-?\d+)?", plain) else None


def thousands(value: Fraction) -> str:
    return f"{value.numerator:,}" if value.denominator == 1 else _decimal_or_fraction(value)


def _decimal_or_fraction(value: Fraction) -> str:
    sign = "-" if value < 0 else ""
    return f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _power_of_ten(text: str, value: Fraction, times: str) -> str:
    """The same value with a power of ten; a fraction that no decimal spells stays as it is."""
    mantissa, _, exponent = text.partition("e")
    if exponent:
        return f"{mantissa} {times} 10^{{{exponent}}}"
    if value.denominator != 1:
        return text
    digits = str(value.numerator).rstrip("0") if value else "0"
    zeros = len(str(value.numerator)) - len(digits) if value else 0
    return f"{digits} {times} 10^{{{zeros}}}"


def number_forms(text: str, value: Fraction) -> list[str]:
    e_form = text if "e" in text else f"{text}e0" if value.denominator == 1 else text
    return [
        f"So it is $\\boxed{{{text}}}$.",
        f"We tried 12 first.\nAnswer: ${text}$",
        f"<answer>N = {thousands(value)}</answer>" if "e" not in text else f"Answer: E = {text}",
        f"\\boxed{{\\boldsymbol{{{text}}}}}",
        f"\\boxed{{(C) {text}}}",
        f"\\boxed{{\\approx {text}}}",
        f"\\boxed{{{_power_of_ten(text, value, '\\times')}}}",
        f"\\boxed{{{_power_of_ten(text, value, '\\cdot')} \\mathrm{{~cm}}}}",
        f"\\boxed{{{e_form.replace(',', '').replace('e', 'E')}}}",
        f"\\boxed{{+{text}}}" if value > 0 else f"\\boxed{{{text} \\text{{ cm}}}}",
    ]


def other_forms(text: str) -> list[str]:
    found = [
        f"So it is $\\boxed{{{text}}}$.",
        f"We tried 12 first.\nAnswer: ${text}$",
        f"<answer>{text}</answer>",
        f"\\boxed{{\\boldsymbol{{{text}}}}}",
        f"\\boxed{{{text.replace('\\frac', '\\dfrac')}}}",
        f"\\boxed{{ {re.sub(r'(?<=[0-9)])([+=])', r' \1 ', text)} }}",
        f"\\boxed{{\\displaystyle {text}}}",
        f"Hence\n\\[ x_0 = \\boxed{{{text}.}} \\]",
        f"\\boxed{{{text.replace('\\infty', '+\\infty').replace('-+', '-')}}}",
        f"\\boxed{{${_inequality(text)}$}}",
    ]
    return [form.replace("\\emptyset", "\\varnothing") if i % 2 else form
            for i, form in enumerate(found)]  # fmt: skip


def _inequality(text: str) -> str:
    """An interval as an inequality in x; anything else as it is."""
    pieces = []
    for piece in re.sub(r"\\(?:left|right)", "", text).split("\\cup"):
        match = re.fullmatch(r"\s*([(\[])([^,]+),([^,]+)([)\]])\s*", piece)
        if not match or ("infty" not in text and match[1] + match[4] in ("()", "[]")):
            return text  # may be a point
        low, high = match[2].strip(), match[3].strip()
        less, until = ("<" if match[1] == "(" else "\\le"), ("<" if match[4] == ")" else "\\leq")
        ends = ("infty" in low, "infty" in high)
        pieces.append(
            {
                (True, True): "x \\in \\mathbb{R}",
                (True, False): f"x {until} {high}",
                (False, True): f"x {'>' if less == '<' else '\\geq'} {low}",
                (False, False): f"{low} {less} x {until} {high}",
            }[ends]
        )
    return " \\text{ or } ".join(pieces)


def forms(label: str) -> list[str]:
    text = bare(label)
    value = number(text)
    return other_forms(text) if value is None else number_forms(text, value)


def wrong_answers(labels: list[str], rng: random.Random) -> Iterator[tuple[str, str]]:
    """(answer, label) without end; never the label's value."""
    while True:
        label = rng.choice(labels)
        text, value = bare(label), number(bare(label))
        if value is None:
            literal = re.search(r"\d+", text)
            if not literal:
                yield ("7", label)
                continue
            changed = str(int(literal[0]) + rng.randint(1, 9))
            yield (text[: literal.start()] + changed + text[literal.end() :], label)
            continue
        off = value * (1 + Fraction(rng.choice([1, -1]), rng.choice([10, 1000, 100_000])))
        near = f"{value.numerator - 1}.9999" if value > 0 else "-0.0001"
        yield (
            rng.choice(
                [
                    str(value + 1) if abs(value) < 10**5 else str(value * 2),
                    str(value * 10) if value else "10",
                    str(-value) if value else "1",
                    near if value.denominator == 1 and "e" not in text else str(value * 3 + 2),
                    f"{text}1" if "e" in text or "\\" not in text else "77.5",
                    str(off) if value else "3",
                    f"{text} \\text{{ or }} {value + 1}",
                    f"{value.numerator}e{value.denominator + 1}" if value else "1e1",
                ]
            ),
            label,
        )


def unevaluated(labels: list[str], rng: random.Random) -> Iterator[tuple[str, str]]:
    """(expression, label) without end, for labels that are integers."""
    whole = [bare(label) for label in labels if (number(bare(label)) or Fraction(1, 2)).denominator
             == 1 and 1 < abs(number(bare(label)) or 0) < 10**6]  # fmt: skip
    while whole:
        label = rng.choice(whole)
        n = int(number(label) or 0)
        a = rng.randint(2, 9)
        expressions = (
            f"{n - a} + {a}",
            f"\\sum_{{k=1}}^{{{a}}} \\frac{{{n}}}{{{a}}}",
            f"\\gcd({2 * n}, {3 * n})" if n > 0 else f"\\frac{{{n * a}}}{{2}} - {n * a // 2 - n}",
            f"\\sqrt{{{n * n}}}" if n > 0 else f"-\\sqrt{{{n * n}}}",
            f"\\int_0^{{1}} {n} dx",
            f"{n * a} \\cdot \\frac{{1}}{{{a}}}",
            f"\\binom{{{n}}}{{1}}" if n > 0 else f"{n} \\cdot \\log_{{{a}}} {a}",
        )
        yield (rng.choice(expressions), label)


def formulas(problem: str) -> list[str]:
    found = re.findall(r"\$\$?([^$]+)\$\$?|\\\[(.+?)\\\]|\\\((.+?)\\\)", problem, re.DOTALL)
    texts = ["".join(parts).strip().rstrip(".,?") for parts in found]
    return [side.strip() for text in texts for side in {text, *text.split("=")} if side.strip()]


def load_sets(data: Path) -> dict[str, list[dict[str, str]]]:
    found = {}
    for file in sorted(data.glob("*.parquet")):
        rows = pyarrow.parquet.read_table(file, columns=["prompt", "reward_model"]).to_pylist()
        found[file.stem] = [
            {"problem": row["prompt"][-1]["content"], "label": row["reward_model"]["ground_truth"]}
            for row in rows
        ]
    for name, labels in (("science", SCIENCE), ("ranges", RANGES)):
        found[name] = [{"problem": "", "label": label} for label in labels]
    return found


Judge = Callable[[list[tuple[str, str]]], list[Any]]  # (answer or response, label) -> verdicts


def measure(judge: Judge, rows: list[dict[str, str]], count: int) -> dict[str, dict[str, int]]:
    """Per kind of answer, how often each verdict came."""
    rng = random.Random(11)
    every = list(dict.fromkeys(row["label"] for row in rows))
    labels = every[:: max(1, len(every) // count)][:count]
    kinds = {
        "forms": [(form, label) for label in labels for form in forms(label)],
        "wrong": list(itertools.islice(wrong_answers(labels, rng), WRONG)),
        "unevaluated": list(itertools.islice(unevaluated(labels, rng), WRONG)),
    }
    found = {
        kind: dict(Counter(verdict.verdict for verdict in judge(_boxed(pairs, kind != "forms"))))
        for kind, pairs in kinds.items()
    }
    copies = [(text, row["label"], place) for place, row in enumerate(rows[:500])
              for text in formulas(row["problem"])[:12]
              if len(text) < 200 and squeezed(text) != squeezed(bare(row["label"]))]  # fmt: skip
    verdicts = judge(_boxed([copy[:2] for copy in copies], True))
    hits = {copy[2] for copy, verdict in zip(copies, verdicts, strict=True)
            if verdict.verdict == "correct"}  # fmt: skip
    return found | {"copied": {"correct": len(hits), "problems": len({c[2] for c in copies})}}


def _boxed(pairs: list[tuple[str, str]], box: bool) -> list[tuple[str, str]]:
    return [(f"\\boxed{{{text}}}", label) for text, label in pairs] if box else pairs


def squeezed(text: str) -> str:
    return re.sub(r"\s|\\left|\\right|[{}]|d(?=frac)", "", text)


def measure_bombs(judge: Judge) -> dict[str, float]:
    """Seconds, processes and verdicts that the bombs cost, one after the other."""
    found: dict[str, float] = Counter()
    for label in ("4", "x+2"):
        for bomb in BOMBS:
            began = time.perf_counter()
            [verdict] = judge([(f"\\boxed{{{bomb}}}", label)])
            found["seconds"] += time.perf_counter() - began
            found["processes"] += verdict.kills
            found[verdict.verdict] += 1
    return {name: round(value, 1) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout to measure")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "math")
    parser.add_argument("--labels", type=int, default=40)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--no-bombs", action="store_true")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    sys.path.insert(0, str(options.tree.resolve()))
    module = MODULES[not (options.tree / (MODULES[0].replace(".", "/") + ".py")).exists()]
    spec = {"math": (f"{module}.math", {})}
    pools = importlib.import_module("megatron_stare.scoring.verifier_pool")
    sample = importlib.import_module("megatron_stare.scoring.verdict").Sample
    document: dict[str, Any] = {}
    table = Table(title=f"accepted / refused / unverifiable; {options.tree.resolve().name}")
    for name in ("labels", "right, 10 forms", "wrong", "unevaluated", "copied: problems"):
        table.add_column(name, justify="left" if name == "labels" else "right")
    with contextlib.closing(pools.VerifierPool(spec, options.processes, 5.0, 4096)) as pool:

        def judge(pairs: list[tuple[str, str]]) -> list[Any]:
            return pool.judge("math", [sample(text, label) for text, label in pairs])

        for name, rows in load_sets(options.data).items():
            document[name] = found = measure(judge, rows, options.labels)
            cells = [
                " / ".join(str(found[kind].get(word, 0)) for word in WORDS)
                for kind in ("forms", "wrong", "unevaluated")
            ]
            table.add_row(name, *cells, "{correct} of {problems}".format(**found["copied"]))
        Console(width=110).print(table)
        if not options.no_bombs:
            document["bombs"] = measure_bombs(judge)
            print(f"{2 * len(BOMBS)} bombs:", document["bombs"])
    if options.json:
        options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
