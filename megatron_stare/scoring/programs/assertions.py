"""A test's assertions, divided: the expressions whose values only the program can compute, and
everything else, which is computed where the program is not.

    assert abs(area(2) - math.pi * 4) < 1e-6      asks the program for area(2) alone

A name is the program's if the program binds it, or if a statement of the test gives it a value that
the program computed or may have changed. Every other name is a builtin, an import or a variable of
the test itself.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megatron_stare.scoring.programs.reading import asserts, in_a_row, parsed, starred

Step = str | int  # a statement, or the number of an expression or condition

# Their values depend on the process, or they reach names that the text does not show.
_PROCESS_BOUND = {"exec", "eval", "compile", "globals", "locals", "vars", "dir", "open", "input"}
_PROCESS_BOUND |= {"__import__", "id", "breakpoint", "exit", "quit", "help"}
# Functions of plain values. Any other function of the program's values runs in its process.
_PLAIN = {"abs", "len", "set", "list", "tuple", "round", "sorted", "bool", "max", "min", "sum"}
_PLAIN |= {"all", "any", "isclose", "allclose", "array_equal"}
_PLAIN_MODULES = ("math", "cmath", "numpy", "np")
_PLAIN_TYPES = {"int", "float", "complex", "str", "bytes", "list", "tuple", "set", "dict"}
_BUILTINS = set(dir(builtins))


@dataclass
class DividedTest:
    """`asked` are the expressions for the program, `conditions` what must hold of their values,
    with `values[i]` in place of asked[i]. Steps: statements, and numbers of `asked` (in the
    program's process) or of `conditions` (where they are checked), each in the test's order.
    """

    asked: list[str] = field(default_factory=list)
    conditions: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)  # the assertions as the test has them
    program_steps: list[Step] = field(default_factory=list)
    checker_steps: list[Step] = field(default_factory=list)


def divide(text: str, code: str, values: str) -> DividedTest | None:
    """The test's parts for a program; None if its assertions do not all stand at its top, or none
    can be checked outside of the program's process.
    `values`: the name of the list that holds the program's values.
    """
    body = in_a_row(text)
    if body is None:
        return None
    found = _Division(body, code, values).found
    return found if found.conditions else None


class _Division:
    def __init__(self, body: Sequence[ast.stmt], code: str, values: str) -> None:
        self.values = values
        bound, imports, self.classes = _bound_by(code)
        # Names whose values do not depend on the program.
        self.own = _BUILTINS - _PROCESS_BOUND - bound | imports.keys()
        self.modules = set(imports)
        self.constants: set[str] = set()
        # Variables that one statement names may hold one object: what changes one changes all.
        self.linked: dict[str, set[str]] = {}
        self.asserting: set[str] = set()  # the test's own functions that assert
        self.found = DividedTest(checker_steps=list(imports.values()))
        steps: list[tuple[ast.stmt, Step, set[str]]] = []
        for statement in body:
            if condition := self._condition_of(statement):
                asked = self._add_condition(statement, condition)
                steps += [(statement, number, set()) for number in asked]
                continue
            written = ast.unparse(statement)
            needed_for = set[str]()  # of a step of the program: always needed
            if self._is_own(statement):
                self.found.checker_steps.append(written)
                self._bind(statement)
                if not isinstance(statement, ast.FunctionDef | ast.ClassDef):
                    needed_for = self._variables(statement)
                elif asserts(statement):
                    self.asserting.add(statement.name)
            else:
                self._lose(_free(statement), _stored(statement))
            steps.append((statement, written, needed_for))
        self.found.program_steps = self._needed(steps)

    def _condition_of(self, statement: ast.stmt) -> ast.expr | None:
        """The condition that an assertion states; for a call of the test's own function that
        asserts, that it returns.
        """
        match statement:
            case ast.Assert(condition):
                return condition
            case ast.Expr(ast.Call(ast.Name(name)) as call) if name in self.asserting:
                return ast.BoolOp(ast.Or(), [call, ast.Constant(True)])
        return None

    def _add_condition(self, statement: ast.stmt, written: ast.expr) -> range:
        """Add a condition; the numbers of the expressions that it asks for."""
        asked = self.found.asked
        first = len(asked)
        while True:
            condition = self._truth(written)
            given = set[str]().union(*(_free(ast.parse(one)) for one in asked[first:]))
            before = len(self.own)
            self._lose(given, set())
            if len(self.own) == before:
                break
            del asked[first:]
        self.found.checker_steps.append(len(self.found.conditions))
        self.found.conditions.append(ast.unparse(ast.fix_missing_locations(condition)))
        self.found.written.append(ast.unparse(statement))
        return range(first, len(asked))

    def _truth(self, node: ast.expr) -> ast.expr:
        """As `_split`, of an expression of which only the truth counts: that of an object which
        cannot leave the program's process, such as a match, is found there.
        """
        match node:
            case ast.BoolOp(op, parts):
                return ast.BoolOp(op, [self._truth(one) for one in parts])
            case ast.UnaryOp(ast.Not() as op, operand):
                return ast.UnaryOp(op, self._truth(operand))
        first = len(self.found.asked)
        condition = self._split(node)
        if self.found.asked[first:] == [ast.unparse(node)]:
            self.found.asked[first] = f"not not ({self.found.asked[first]})"
        return condition

    def _split(self, node: ast.expr) -> ast.expr:
        """The expression with `values[i]` in place of the parts that the program computes."""
        if self._is_own(node):
            return node
        match node:
            case ast.Compare(left, ops, comparators) if not any(
                map(self._makes_its_object, (left, *comparators))
            ):
                if not any(map(_is_singleton, (left, *comparators))):
                    # Values that are read from JSON are equal to others, but not identical.
                    ops = [ast.Eq() if isinstance(op, ast.Is) else op for op in ops]
                return ast.Compare(
                    self._split(left), ops, [self._split(one) for one in comparators]
                )
            case ast.BoolOp(op, parts):
                return ast.BoolOp(op, [self._split(one) for one in parts])
            case ast.UnaryOp(op, operand):
                return ast.UnaryOp(op, self._split(operand))
            case ast.BinOp(left, op, right):
                return ast.BinOp(self._split(left), op, self._split(right))
            case ast.Call(function, arguments, keywords) if self._takes_plain_values(node):
                return ast.Call(
                    function,
                    [self._split(one) for one in arguments],
                    [ast.keyword(one.arg, self._split(one.value)) for one in keywords],
                )
            case ast.Call(ast.Attribute(ast.Compare() as compared, "all"), [], []):
                # NumPy's: outside, where an array is a list, a comparison may be one bool.
                every = ast.parse("__import__('numpy').all", mode="eval").body
                return ast.Call(every, [self._split(compared)], [])
            case ast.List(parts) | ast.Tuple(parts) if not starred(parts):
                return type(node)([self._split(one) for one in parts], node.ctx)
            case ast.GeneratorExp() | ast.ListComp() | ast.SetComp():
                first = node.generators[0]
                rest = ast.comprehension(first.target, ast.Tuple([]), first.ifs, first.is_async)
                inner = type(node)(node.elt, [rest, *node.generators[1:]])
                if self._is_own(inner) and all(map(_is_method, ast.walk(inner))):
                    rest.iter = self._split(first.iter)
                    return inner
                if len(node.generators) == 1 and not first.is_async:
                    return self._split_each(node)
        return self._ask(node)

    def _ask(self, node: ast.expr) -> ast.expr:
        """The name of a value that the program computes."""
        self.found.asked.append(ast.unparse(node))
        return ast.parse(f"{self.values}[{len(self.found.asked) - 1}]", mode="eval").body

    def _split_each(self, node: ast.GeneratorExp | ast.ListComp | ast.SetComp) -> ast.expr:
        """all(f(i) == i + 1 for i in (1, 2)) asks for [(f(i),) for i in (1, 2)], and holds if
        all(value == i + 1 for i, (value,) in zip((1, 2), ...)) does.
        """
        (loop,), asked = node.generators, self.found.asked
        own, names = self.own, _stores(ast.walk(loop.target))
        known = all(map(self._is_own, (loop.iter, *(_within(one, names) for one in loop.ifs))))
        self.own = own | names if known else own - names
        self.found.asked = []
        element = self._split(node.elt)
        self.own, parts, self.found.asked = own, self.found.asked, asked
        each = ", ".join(f"{self.values}_{number}" for number in range(len(parts)))
        element = _Renamed(self.values).visit(element)
        tail = ast.unparse(ast.GeneratorExp(ast.Constant(0), [loop])).removeprefix("(0 ")[:-1]
        rows = self._ask(ast.parse(f"[({', '.join(parts)},) {tail}]", mode="eval").body)
        target, rows_text = f"({each},)", ast.unparse(rows)
        if known:
            item = ast.unparse(loop.target)
            target = f"({item}, {target})"
            rows_text = f"zip([{item} {tail}], {rows_text}, strict=True)"
        made = ast.parse(f"[0 for {target} in {rows_text}]", mode="eval").body
        assert isinstance(made, ast.ListComp)
        return type(node)(element, made.generators)

    def _makes_its_object(self, node: ast.expr) -> bool:
        """Whether a side of a comparison is an object of a class of the program's: only that class
        knows what equals it.
        """
        match node:
            case ast.Call(ast.Name(name)):
                return name in self.classes
            case ast.List(parts) | ast.Tuple(parts) | ast.Set(parts):
                return any(map(self._makes_its_object, parts))
        return False

    def _takes_plain_values(self, call: ast.Call) -> bool:
        """Whether the call can be made outside of the program's process, on its arguments' values:
        also a builtin that the program defines again, if its argument is the program's as well.
        """
        if starred(call.args):
            return False
        match call.func:
            case ast.Name(name) if name in self.asserting:
                return True
            case ast.Name("isinstance") if len(call.args) == 2:
                return _free(call.args[1]) <= _PLAIN_TYPES & self.own
            case ast.Name(name) if name in _PLAIN:
                given = set[str]().union(*(_free(one) for one in call.args))
                return name in self.own or bool(given - self.own - _BUILTINS)
            case ast.Attribute(ast.Name(module)):
                return module in _PLAIN_MODULES and module in self.own
        return False

    def _is_own(self, node: ast.AST) -> bool:
        if any(isinstance(one, ast.NamedExpr | ast.Await) for one in ast.walk(node)):
            return False
        return _free(node) <= self.own

    def _variables(self, node: ast.AST) -> set[str]:
        """The test's own variables in it: neither imports nor builtins."""
        return (_free(node) | _stored(node)) - self.modules - _BUILTINS

    def _bind(self, statement: ast.stmt) -> None:
        """Note the variables of a statement that the program has no part in."""
        stored = _stored(statement)
        self.own |= stored
        if isinstance(statement, ast.Import | ast.ImportFrom):
            self.modules |= stored
            return
        self.modules -= stored
        self.constants -= stored
        if isinstance(statement, ast.Assign) and _is_constant(statement.value):
            self.constants |= stored
            return
        variables = self._variables(statement) - self.constants
        group = variables.union(*(self.linked.get(name, set()) for name in variables))
        self.linked |= dict.fromkeys(group, group)

    def _lose(self, given: set[str], stored: set[str]) -> None:
        """The program was given these names' values, and may have changed them; or set them."""
        self.modules -= stored
        self.constants -= stored
        lost = (given | stored) - self.modules - self.constants - (_BUILTINS - stored)
        self.own -= lost.union(*(self.linked.get(name, set()) for name in lost))

    def _needed(self, steps: Sequence[tuple[ast.stmt, Step, set[str]]]) -> list[Step]:
        """The steps for the program's process: its own, and of the test's other statements those
        that they need. So it holds no value that is only compared with.
        """
        needed: set[str] = set()
        found: list[Step] = []
        for statement, step, names in reversed(steps):
            group = names.union(*(self.linked.get(name, set()) for name in names))
            if names and not group & needed:
                continue
            part = ast.parse(self.found.asked[step]) if isinstance(step, int) else statement
            needed |= _free(part)
            found.append(step)
        return found[::-1]


def _bound_by(code: str) -> tuple[set[str], dict[str, str], set[str]]:
    """The names that a program binds at its top; its imports of mathematics and of Python's own
    modules under their own names, by name, which a test may rely on; and its classes, but for those
    that are named like a builtin.
    """
    body = parsed(code)
    bound: set[str] = set()
    imports: dict[str, str] = {}
    for statement in body:
        match statement:
            case ast.Import([ast.alias(name, None)]) if name in sys.stdlib_module_names | {"numpy"}:
                imports[name] = ast.unparse(statement)
            case ast.Import([ast.alias("numpy", "np")]):
                imports["np"] = ast.unparse(statement)
            case ast.ImportFrom("math", [ast.alias(name, None)]) if name != "*":
                imports[name] = ast.unparse(statement)
            case _:
                bound |= _stored(statement)
    classes = {one.name for one in body if isinstance(one, ast.ClassDef)} - _BUILTINS
    return bound, {name: line for name, line in imports.items() if name not in bound}, classes


class _Renamed(ast.NodeTransformer):
    """`values[i]` as the name values_i."""

    def __init__(self, values: str) -> None:
        self.values = values

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        match node:
            case ast.Subscript(ast.Name(self.values), ast.Constant(int(number))):
                return ast.Name(f"{self.values}_{number}", ast.Load())
        self.generic_visit(node)
        return node


def _within(node: ast.expr, names: set[str]) -> ast.expr:
    """The expression with these names bound: as a lambda's body."""
    arguments = [ast.arg(name) for name in sorted(names)]
    return ast.Lambda(ast.arguments([], arguments, None, [], [], None, []), node)


def _local(node: ast.AST) -> set[str]:
    """Names that are bound inside comprehensions, lambdas and functions alone."""
    found: set[str] = set()
    for one in ast.walk(node):
        if isinstance(one, ast.comprehension):
            found |= _stores(ast.walk(one.target))
        elif isinstance(one, ast.Lambda | ast.FunctionDef):
            found |= {each.arg for each in ast.walk(one.args) if isinstance(each, ast.arg)}
            if isinstance(one, ast.FunctionDef):
                found |= _stores(inner for line in one.body for inner in ast.walk(line))
    return found


def _stores(nodes: Iterable[ast.AST]) -> set[str]:
    found: set[str] = set()
    for node in nodes:
        match node:
            case ast.Name(name, ast.Store() | ast.Del()):
                found.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.alias(name, alias):
                found.add(alias or name.split(".")[0])
    return found


def _stored(node: ast.AST) -> set[str]:
    """The names that a statement binds."""
    match node:
        case ast.Assign([ast.Name(name)], ast.Constant()):  # thousands, of loops written out
            return {name}
    return _stores(ast.walk(node)) - _local(node)


def _free(node: ast.AST) -> set[str]:
    """The names that an expression or a statement takes from outside."""
    found: set[str] = set()
    match node:
        case ast.Assign([ast.Name()], ast.Constant()):
            return found
    for one in ast.walk(node):
        match one:
            case ast.Name(name, ast.Load()) | ast.AugAssign(ast.Name(name)):
                found.add(name)
    return found - _local(node)


def _is_singleton(node: ast.expr) -> bool:
    """None, True or False, of which there is one in every process."""
    return isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool))


def _is_method(node: ast.AST) -> bool:
    """False for an attribute that no plain value has."""
    plain = (str, bytes, list, dict, set, complex, int)
    return not isinstance(node, ast.Attribute) or any(hasattr(one, node.attr) for one in plain)


def _is_constant(node: ast.expr) -> bool:
    """A number, a text, or a tuple of them: nothing that a program could change."""
    if isinstance(node, ast.Constant):  # a loop that is written out has any value in one
        return isinstance(node.value, str | int | float | complex | bytes | None)
    return isinstance(node, ast.Tuple) and all(_is_constant(one) for one in node.elts)
