"""The house rules: which module may import which, how long a file or function may be,
and in what letters.
"""

import ast
import graphlib

import pytest

from tests.paths import ROOT

PACKAGE = ROOT / "megatron_stare"
LAYERS = [
    {"__init__"},
    {"records", "config"},
    {"numerics", "recipes"},
    {"data", "rollout", "scoring", "losses", "policy", "reporting"},
    {"loop"},
    {"__main__"},
]
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {file: ast.parse(file.read_text(encoding="utf-8")) for file in FILES}
MODULES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
    for file in FILES
}


def imported(module: str) -> set[str]:
    """The modules of this package that `module` imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(TREES[MODULES[module]]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import, line {node.lineno}"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in MODULES else str(node.module))
    return {name for name in found if name.split(".")[0] == PACKAGE.name} - {module}


def part(module: str) -> str:
    """The folder or file directly under the package that a module belongs to."""
    return [*module.split("."), "__init__"][1]


def test_every_part_has_a_layer():
    assert {part(module) for module in MODULES} <= LEVEL.keys()


def test_imports_only_point_down():
    wrong = [
        f"{module} imports {other}"
        for module in MODULES
        for other in imported(module)
        if part(module) != part(other) and LEVEL[part(other)] >= LEVEL[part(module)]
    ]
    assert not wrong


def test_no_import_cycle():
    graphlib.TopologicalSorter({module: imported(module) for module in MODULES}).prepare()


def test_imported_modules_exist():
    assert not [
        (module, other) for module in MODULES for other in imported(module) if other not in MODULES
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_lengths_and_letters(file):
    text = file.read_text(encoding="utf-8")
    assert text.isascii()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, f"{node.name} has over 60 lines"


def test_only_topology_reads_megatrons_global_state():
    reading = [
        str(file.relative_to(PACKAGE))
        for file in FILES
        if "parallel_state" in file.read_text(encoding="utf-8")
    ]
    assert reading == ["policy/topology.py"]


def test_the_first_link_of_the_readme_is_short():
    assert len((PACKAGE / "losses" / "stare.py").read_text().splitlines()) < 200
