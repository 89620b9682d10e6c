"""Every branch of the package that CUDA decides, found in its source.

A place is a line that must be executed on the device: a statement that names CUDA, and where it is
a condition, the first line of the arm that CUDA takes, unless that refuses something.
"""

from __future__ import annotations

import ast
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.paths import ROOT
from tools.nullcuda.lines import want

PACKAGE = ROOT / "megatron_stare"
# Attributes, names and whole strings that name CUDA.
NAMES = {"is_cuda", "pin_memory", "non_blocking", "HAVE_TE", "triton", "ipc_collect", "on_gpu"}
NAMES |= {"_has_transformer_engine", "transformer_engine", "fp8", "_check_fp8", "vocab_kernels"}
NAMES |= {"model_parallel_cuda_manual_seed", "get_cuda_rng_tracker", "current_device"}
WORDS = ("cuda", "nccl", "transformer_engine", "fp8")
# Strings and keywords with another meaning: of the command line, of a server, of a planner.
ELSEWHERE = ("config/", "recipes/", "planning/", "commands/arguments.py", "policy/quantization.py")
ELSEWHERE += ("policy/runtime.py", "commands/quantize.py")
ELSEWHERE += ("policy/huggingface/fp8_weights.py", "commands/plan.py")
# Entered by the slow tests of K4 and of the stages with servers.
ELSEWHERE += ("commands/gpuday/rank_memory.py", "commands/gpuday/runs.py")


_watching: list[tempfile.TemporaryDirectory[str]] = []  # kept until this process ends


def watch() -> None:
    """From here on this process and its children record the places that they enter."""
    lines: dict[str, list[int]] = {}
    for place in places():
        lines.setdefault(str(place.file), []).append(place.line)
    _watching.append(tempfile.TemporaryDirectory(prefix="branches-"))
    want(Path(_watching[-1].name), lines)


@dataclass(frozen=True)
class Place:
    file: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}: {self.text}"


def places() -> list[Place]:
    """All places, in the order of the source."""
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        if not str(file.relative_to(PACKAGE)).startswith(ELSEWHERE):
            found += _places_of(file)
    return found


def _places_of(file: Path) -> list[Place]:
    text = file.read_text(encoding="utf-8")
    rows, lines = text.splitlines(), set()
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_kernel(
            function
        ):
            for statement in _statements(function):
                lines |= _lines_of(statement)
    return [Place(file, line, rows[line - 1].strip()) for line in sorted(lines)]


def _is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether the function runs on the device, not on the host."""
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def _statements(tree: ast.AST) -> list[ast.stmt]:
    """The places of this function, without those of inner functions and of branches for machines
    without CUDA.
    """
    found: list[ast.stmt] = []
    elsewhere = tree.body if isinstance(tree, ast.If) and _is_without_cuda(tree.test) else []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if node in elsewhere:
            continue
        if isinstance(node, ast.stmt):
            found.append(node)
        found += _statements(node)
    return found


def _lines_of(statement: ast.stmt) -> set[int]:
    if isinstance(statement, ast.If | ast.While):
        if not _names_cuda(statement.test):
            return set()
        arm = statement.orelse if _is_negative(statement.test) else statement.body
        taken = {arm[0].lineno} if arm and not isinstance(arm[0], ast.Raise) else set()
        return {statement.test.lineno} | taken
    if isinstance(statement, ast.For | ast.With | ast.Try | ast.AsyncFor | ast.AsyncWith):
        heads = [getattr(statement, "iter", None), *getattr(statement, "items", [])]
        return {statement.lineno} if any(head and _names_cuda(head) for head in heads) else set()
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return set()  # a docstring
    if isinstance(statement, ast.Raise):
        return set()  # an error message that contains the word
    return {statement.lineno} if _names_cuda(statement) else set()


def _is_without_cuda(test: ast.expr) -> bool:
    return ast.unparse(test) == "not torch.cuda.is_available()"


def _is_negative(test: ast.expr) -> bool:
    """Whether CUDA takes the other arm."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _names_cuda(test.operand)
    return isinstance(test, ast.Compare) and any(
        isinstance(side, ast.Constant) and side.value in ("none", "gloo", "cpu")
        for side in test.comparators
        if isinstance(test.ops[0], ast.Eq)
    )


def _names_cuda(tree: ast.AST) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (node.attr in NAMES or node.attr == "cuda"):
            return True
        if isinstance(node, ast.Name | ast.keyword | ast.alias):
            name = (
                node.id
                if isinstance(node, ast.Name)
                else (node.arg if isinstance(node, ast.keyword) else node.name)
            )
            if name in NAMES:
                return True
        if isinstance(node, ast.ImportFrom) and "transformer_engine" in str(node.module):
            return True
        if isinstance(node, ast.Constant) and node.value in WORDS:
            return True
    return False
