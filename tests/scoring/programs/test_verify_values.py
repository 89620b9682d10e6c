"""Every value that a program returns or forges gives a verdict and raises nothing."""

from __future__ import annotations

import json
import random
import re
import time
from typing import Any

import pytest

from megatron_stare.rollout.sandbox.interpreter import Execution
from megatron_stare.scoring.programs.reading import CodeTest
from megatron_stare.scoring.programs.verify import same_json, verify_code
from tests.rollout.sandbox.sandboxes import open_kind

PROGRAM = "```python\n{}\n```"
EXPECTED: list[Any] = [2.5, 3, "x", None, True, [1, [2.5]], {"a": 1.5}, 10**30, [{"1": []}], 1e308]
RETURNED = [
    "__import__('math').factorial(400)",
    "10 ** 5000",
    "-10 ** 400",
    "float('inf')",
    "float('nan')",
    "{2 ** 61 * i - i for i in range(3000)}",
    "[[]] * 99999",
    "'\\ud800'",
    "b'\\xff'",
    "1e308 * 10j",
    "{(1, 2): 3}",
    "{1: 2, '1': 3}",
    "{None: 1, float('nan'): 2}",
    "type",
    "object()",
    "f",
    "(i for i in f)",
    "__import__('functools').reduce(lambda a, b: [a], range(9000), 0)",
    "__import__('numpy').float64(1)",
]
KINDS = (
    "int",
    "float",
    "complex",
    "bytes",
    "list",
    "tuple",
    "set",
    "dict",
    "other",
    "no such kind",
)
LEAVES = [
    None,
    True,
    0,
    -1,
    10**400,
    1e999,
    float("nan"),
    "",
    "f" * 400,
    "-0",
    "inf",
    "9e999",
    "\ud800",
    [],
    {},
    ["int"],
    ["int", "f" * 400],
    ["int", 1e999],
    ["float", "1e999"],
    ["float", 10**400],
    ["float", []],
    ["set", [["int", format((2**61 - 1) * i, "x")] for i in range(300)]],
    [["int", "1"], "int"],
]


@pytest.fixture(scope="module")
def run():
    with open_kind("limits", wall_seconds=5.0) as sandbox:
        yield sandbox.run


def forged(draw: random.Random, depth: int = 3) -> Any:
    """Something that may stand where a value is written."""
    if not depth or draw.random() < 0.3:
        return draw.choice(LEAVES)
    inner = [forged(draw, depth - 1) for _ in range(draw.randrange(4))]
    return [draw.choice(KINDS), inner] if draw.random() < 0.7 else inner


def answering(line: str):
    """A sandbox whose programs print this line in place of their values."""

    def run(code: str, stdin: str = "", wall_seconds: float | None = None) -> Execution:
        (mark,) = set(re.findall("encoded_[0-9a-f]{32}", code))
        return Execution(f"\n{mark}{line}", "", None, "ok", 0.0)

    return run


def test_no_forged_value_raises():
    draw = random.Random(0)
    lines = [json.dumps(["list", [forged(draw)]]) for _ in range(1500)]
    lines += ["[" * 100_000, '{"a":' * 100_000, "9" * 10_000, "", "NaN", "[]", "null", '["list"]']
    lines += ["[" * depth + "]" * depth for depth in range(100, 3000, 100)]
    lines += ['["list", [' + '["list", [' * 50_000 + "]]" * 50_000 + "]]"]
    for line in lines:
        for expected in EXPECTED:
            test = CodeTest(function="f", values=(expected,))
            assert verify_code(PROGRAM.format("f = 1"), [test], answering(line)).total == 1


@pytest.mark.parametrize("returned", RETURNED)
def test_no_returned_value_raises(run, returned):
    tests = [CodeTest(function="f", values=(expected,)) for expected in EXPECTED]
    tests += [
        CodeTest(assertion=text) for text in ("assert abs(f() - 2.5) < 1", "assert f() == {1}")
    ]
    verdict = verify_code(PROGRAM.format(f"def f(): return {returned}"), tests, run)
    assert verdict.passed == 0 and verdict.failure


@pytest.mark.parametrize("test", ["assert f() == {1}", "assert set(f()) == {1}", "assert 1 in f()"])
def test_colliding_sets_take_no_time_of_the_trainer(run, test):
    """Equal hashes make a set of them quadratic; the sandbox's limits bound that."""
    code = "def f(): return [(2 ** 61 - 1) * i for i in range(1, 40000)]"
    began = time.process_time()
    verdict = verify_code(PROGRAM.format(code), [CodeTest(assertion=test)], run)
    assert not verdict.correct and time.process_time() - began < 0.5


def test_integers_and_keys_as_json_writes_them():
    assert same_json(["int", "-ff"], -255, 0.0) and not same_json(["int", "ff"], True, 0.0)
    assert same_json(["int", "2"], 2.0, 0.0) and not same_json(["float", "2.0"], 2, 0.0)
    mapping = ["dict", [[["int", "a"], "x"], [True, None]]]
    assert same_json(mapping, {"10": "x", "true": None}, 0.0)
    assert not same_json(mapping, {"10": "x"}, 0.0)
