"""Expected values are computed outside of the program's process, in the real sandbox."""

from __future__ import annotations

import textwrap

import pytest

from megatron_stare.config import UserError
from megatron_stare.scoring.programs.assertions import divide
from megatron_stare.scoring.programs.reading import CodeTest, in_a_row, read_tests
from megatron_stare.scoring.programs.verify import verify_code
from tests.rollout.sandbox.sandboxes import open_kind

FENCE = "```"
# Knows nothing, and makes everything that its process says of values say True, 1 or the like.
FORGER = """
import json, math
import numpy as np
real_dumps, real_print = json.dumps, print
def f(*arguments):
    return globals().get('expected')
def forged(value, *rest, **options):
    return real_dumps(value, *rest, **options).replace('false', 'true')
json.dumps = forged
math.isclose = isinstance = all = any = np.allclose = lambda *a, **b: True
abs = len = lambda value: 0
def print(text, *rest):
    mark, _, values = str(text).partition('["list"')
    values = json.loads('["list"' + values) if values else ['list', []]
    same = values[1][-1] if values[1] else True
    real_print(mark + real_dumps(['list', [same for _ in values[1]]]))
"""
EQUAL_TO_ALL = """
class Same(float):
    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __sub__ = __rsub__ = __abs__ = lambda self, *other: 0.0
    __hash__ = lambda self: 0
def f(*arguments):
    return Same('nan')
"""
# As EvalPlus writes its tests.
LOOP = "inputs = [[1], [2]]\nresults = [2, 3]\n"
LOOP += "for i, (inp, exp) in enumerate(zip(inputs, results)):\n"
ASSERTION = """
import numpy as np
def is_floats(x):
    return isinstance(x, float)
def assertion(out, exp, atol):
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if out != exp and atol != 0:
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert out == exp, f"out: {out}, exp: {exp}"
"""
UNITTEST = "import unittest\nclass Tests(unittest.TestCase):\n"
EXPECTATIONS = [
    "expected = 6\nassert f(5) == expected",
    "expected = 2 * 3\nwanted = expected + 0\nassert f(5) == wanted",
    "assert f(5) == 2 * 3",
    "assert f(5) == [i * i for i in range(3)]",
    "assert f(5) == float('inf')",
    "import math\nassert f(5) == math.pi",
    "assert f(5) == math.pi",
    "assert f(5) == dict(a=1)",
    "assert f(5) == f'{6:3}'",
    "import math\nassert math.isclose(f(3), 28.27, rel_tol=0.001)",
    "assert isinstance(f(3), (int, float))",
    "assert all(x > 3 for x in f(3))",
    "assert any(f(3))",
    "assert len(f(3)) > 1",
    "assert abs(f(2) - 4) < 1e-6",
    "import numpy as np\nassert np.allclose(f(3), [1.0, 2.0])",
    "assert all(f(i) == i + 1 for i in [1, 2, 3])",
    "assert all([f(i) == i + 1 for i in range(3) if i != 1])",
    "assert all([f(1) == 2, f(2) == 3])",
    "cases = [(1, 2), (3, 4)]\nassert all(f(a) == b for a, b in cases)",
    "assert sum(f(i) == i + 1 for i in range(3)) == 3",
    "assert all(all(f(i, j) == i * j for j in range(2)) for i in range(1, 3))",
    "assert [f(1), f(2)] == [2, 3]",
    "from fractions import Fraction\nassert f(0) == Fraction(1, 3)",
    "import datetime\nassert f(0) == datetime.date(2020, 1, 2)",
    "for a, b in [(1, 2), (3, 4)]:\n    assert f(a) == b",
    "for i in range(3):\n  for j in (1, 2):\n    wanted = i * j\n    assert f(i, j) == wanted",
    "import numpy as np\nassert (f(5) == np.array([1, 2])).all()",
    "cases = {1: 2, 3: 4}\nfor given, wanted in cases.items():\n    assert f(given) == wanted",
    f"{LOOP}    assert f(*inp) == exp",
    f"{ASSERTION}{LOOP}    assertion(f(*inp), exp, 0)",
    f"def check(g):\n{textwrap.indent(f'{ASSERTION}{LOOP}    assertion(g(*inp), exp, 0)', '  ')}\n"
    "check(f)",
    "expected = [6, 7]\nexpected.append(8)\ndef check(g):\n    assert g(5) == expected\n\ncheck(f)",
]


@pytest.fixture(scope="module")
def run():
    with open_kind("limits", wall_seconds=5.0) as sandbox:
        yield sandbox.run


def passes(run, code: str, assertion: str) -> bool:
    return verify_code(
        f"{FENCE}python\n{code}\n{FENCE}", [CodeTest(assertion=assertion)], run
    ).correct


@pytest.mark.parametrize("assertion", EXPECTATIONS)
@pytest.mark.parametrize("forger", [FORGER, EQUAL_TO_ALL], ids=["forger", "equal to all"])
def test_a_program_cannot_forge_what_is_expected(run, assertion, forger):
    # What it returns is a float, as is asked.
    weak = forger is EQUAL_TO_ALL and assertion.startswith("assert isinstance")
    assert passes(run, forger, assertion) == weak


@pytest.mark.parametrize(
    ("code", "assertion"),
    [
        ("def f(x): return 6", EXPECTATIONS[0]),
        ("def f(x): return 6", EXPECTATIONS[1]),
        ("def f(x): return [0, 1, 4]", EXPECTATIONS[3]),
        ("import math\ndef f(x): return math.pi", EXPECTATIONS[6]),
        ("def f(x): return {'a': 1}", EXPECTATIONS[7]),
        ("def f(x): return 28.2743", EXPECTATIONS[9]),
        ("def f(x): return 1.5", EXPECTATIONS[10]),
        ("def f(x): return [4, 5]", EXPECTATIONS[11]),
        ("import numpy as np\ndef f(x): return np.array([1.0, 2.0])", EXPECTATIONS[15]),
        ("def f(x): return [6, 7, 8]", EXPECTATIONS[-1]),
        ("def f(x): return x + 1", EXPECTATIONS[16]),
        ("def f(x): return x + 1", EXPECTATIONS[17]),
        ("def f(x): return x + 1", EXPECTATIONS[18]),
        ("def f(x): return x + 1", EXPECTATIONS[19]),
        ("def f(x): return x + 1", EXPECTATIONS[20]),
        ("def f(i, j): return i * j", EXPECTATIONS[21]),
        ("from fractions import Fraction\ndef f(x): return Fraction(1, 3)", EXPECTATIONS[23]),
        ("import datetime\ndef f(x): return datetime.date(2020, 1, 2)", EXPECTATIONS[24]),
        (
            "from decimal import Decimal\ndef f(x): return Decimal('1.5')",
            "from decimal import Decimal\nassert f(0) == Decimal('1.5')",
        ),
        (
            "class P:\n  def __init__(self, x): self.x = x\n"
            "  def __eq__(self, other): return self.x == other.x\ndef f(x): return P(x)",
            "assert f(3) == P(3) and [f(1)] == [P(1)]",
        ),
        (
            "seen = []\ndef f(x):\n    seen.append(x)\n    return len(seen)",
            "assert all(f(i) == i and f(i) != i for i in (1, 3, 5))",
        ),
        ("def f(n): return n * n", "n = 5\nassert f(n) == n * n"),
        ("def f(xs): xs.sort()", "xs = [3, 1]\nf(xs)\nassert xs == [1, 3]"),
        ("def f(xs): xs.sort(); return xs", "xs = [3, 1]\nassert f(xs) == [1, 3] and xs[0] == 1"),
        ("def f(xs): xs.append(2)", "xs = [1]\nys = xs\nf(ys)\nassert xs == [1, 2]"),
        (
            "def f(xs): return sorted(xs)",
            "import random\nxs = [random.random() for _ in range(5)]\nassert f(xs) == sorted(xs)",
        ),
        ("def f(n):\n    for i in range(n): yield i", "assert list(f(3)) == [0, 1, 2]"),
        (
            "from collections import deque\ndef f(n): return deque(range(n))",
            "assert len(f(3)) == 3",
        ),
        (
            "class S:\n  def __init__(self): self.x = []\n  def push(self, v): self.x.append(v)\n"
            "  def __str__(self): return str(self.x)",
            "s = S()\ns.push(1)\nassert s.x == [1] and str(s) == '[1]'\n"
            "s.push(2)\nassert len(s.x) == 2",
        ),
        ("def sum(a, b): return a + b", "assert sum(10, 15) == 25"),
        (
            "def f(x): return x",
            "expected = 1\nassert f(1) == expected\nexpected = 2\nassert f(2) == expected",
        ),
        (
            "def f(x):\n    if x < 0: raise ValueError",
            "try:\n    f(-1)\n    raised = 0\nexcept ValueError:\n    raised = 1\nassert raised",
        ),
        (
            "def f(node): return node.value",
            "class Node:\n    def __init__(self, v): self.value = v\nassert f(Node(3)) == 3",
        ),
        ("import math\ndef f(r): return math.pi * r * r", "assert abs(f(2) - math.pi * 4) < 1e-9"),
        ("def f(): return 1000", "assert f() is not None and f() is 1000"),
        ("def f(): return 10 ** 5000", "assert f() == 10 ** 5000"),
        (
            "def f(x): return -x",
            "assert not f(0) and -f(1) == 1 and 0 < f(-2) <= 2\nassert f(-8) % 3 == 2",
        ),
        ("def f(x): return x + 1", EXPECTATIONS[25]),
        ("def f(i, j): return i * j", EXPECTATIONS[26]),
        ("import numpy as np\ndef f(x): return np.array([1, 2])", EXPECTATIONS[27]),
        ("def f(x): return x + 1", EXPECTATIONS[28]),
        ("def f(x): return x + 1", EXPECTATIONS[29]),
        ("def f(x): return x + 1", EXPECTATIONS[30]),
        ("def f(x): return x + 1", EXPECTATIONS[31]),
        ("def f(x): return x + 1 + 1e-9", f"{ASSERTION}assertion(f(1), 2.0, 0)"),
        ("import re\ndef f(x): return re.match('a', x)", "assert f('a') and not f('b')"),
        ("def f(x): return range(x)", "assert f(3) == range(3) and list(f(2)) == [0, 1]"),
        (
            "def f(x): return x\nif __name__ == '__main__':\n    print(f(input()))",
            "assert f(3) == 3",
        ),
        ("def f(x): return x + 1", f"{UNITTEST}    def test(self): self.assertEqual(f(5), 6)"),
        (
            "def f(x): return x + 1",
            f"{UNITTEST}    def test(self): self.assertEqual(f(5), 6)\n"
            "if __name__ == '__main__':\n    unittest.main()",
        ),
        (
            "def f(x): return [x]",
            "out = []\nfor i in range(3):\n    out += f(i)\nassert out == [0, 1, 2]",
        ),
    ],
)
def test_right_programs_pass(run, code, assertion):
    assert passes(run, code, assertion)


@pytest.mark.parametrize(
    ("code", "assertion"),
    [
        ("def f(x): return x", f"{UNITTEST}    def test(self): self.assertEqual(f(5), 6)"),
        ("def f(x): return 6", f"{UNITTEST}    def other(self): self.assertEqual(f(5), 6)"),
        ("def f(x): return min(x, 2)", f"{ASSERTION}{LOOP}    assertion(f(*inp), exp, 0)"),
        (
            "import sys\ndef f(x):\n    frame = sys._getframe(1)\n"
            "    return frame.f_locals.get('exp', frame.f_globals.get('results', [x])[0])",
            f"{LOOP}    assert f(*inp) == exp",
        ),
    ],
)
def test_wrong_programs_fail(run, code, assertion):
    assert not passes(run, code, assertion)


@pytest.mark.parametrize(
    "text",
    [
        "def test_f():\n    assert f(5) == 6",
        f"{ASSERTION}inputs = [1]",
        "class Tests:\n    def test(self):\n        assert f(5) == 6",
    ],
)
def test_a_test_that_checks_nothing_is_refused(text):
    with pytest.raises(UserError, match=r"metadata.tests\[0\] is .* it checks nothing"):
        read_tests([text])


def test_a_loop_is_written_out_only_where_its_items_are_known():
    for loop in (
        "for x in [f(1)]:\n    assert x == 1",
        "xs = [1]\nxs.append(2)\nfor x in xs:\n    assert f(x) == x",
        "xs = [1]\nys = xs\nys.append(2)\nfor x in xs:\n    assert f(x) == x",
        "xs = [1]\nxs += [2]\nfor x in xs:\n    assert f(x) == x",
        "xs = [1]\nassert f(xs) == 1\nfor x in xs:\n    assert f(x) == x",
        "for x in [1]:\n    if x:\n        assert f(x) == x",
        "for x, y in [1]:\n    assert f(x) == y",
        "for x in range(2000):\n    assert f(x) == x",
    ):
        assert in_a_row(loop) is None


def test_the_programs_process_does_not_hold_expected_values():
    test = "import math\nn = 3\nshown = [n]\nexpected = math.pi\nassert f(n, shown) == expected + 7"
    found = divide(test, "def f(n, shown): return n", "values")
    assert found is not None and found.asked == ["f(n, shown)"]
    assert found.program_steps == ["import math", "n = 3", "shown = [n]", 0]
    assert found.checker_steps == ["import math", "n = 3", "shown = [n]", "expected = math.pi", 0]
    assert found.conditions == ["values[0] == expected + 7"]
    assert divide("for i in f(3):\n    assert f(i) == i", "", "values") is None
