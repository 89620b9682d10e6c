"""The house rules: which room may import which, how long things may be, and where tests lie."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
from pathlib import Path

import pytest

from tests.paths import ROOT

PACKAGE = ROOT / "megatron_stare"

# Lowest first: a part imports only parts of lower layers, and never one of its own layer.
# A folder not named here has no order of its own beyond that it holds no cycle.
LAYERS: dict[str, list[set[str]]] = {
    "": [
        {"__init__"},
        {"system", "event_loop", "http_client"},
        {"records", "config"},
        {"numerics", "recipes"},
        {"data", "rollout", "scoring", "losses", "policy", "reporting"},
        {"collect", "sync"},
        {"loop", "planning"},
        {"debug"},
        {"compare"},
        {"api"},
        {"commands"},
        {"__main__"},
    ],
    "policy": [
        {"__init__", "runtime", "manifest", "head", "cpu_layers"},
        {"topology"},
        {"model_state", "layout", "huggingface", "tuning"},
        {"packing", "build", "experts", "adapters"},
        {"model", "optimizer"},
        {"actor", "conversion", "quantization"},
        {"checkpoints"},
    ],
    "rollout": [
        {"__init__", "engine", "embedded_model", "sandbox"},
        {"episodes"},
        {"embedded", "sglang", "tools"},
        {"agents"},
    ],
    "scoring": [
        {"__init__", "verdict", "advantages", "mirror_grid", "programs"},
        {"remote", "verifier_pool", "verifiers"},
        {"gym_verifier", "judge_client", "mathematics"},
        {"judge", "llm_judge"},
    ],
    "loop": [
        {"__init__", "interrupt", "run_directory", "watchdog"},
        {"metrics"},
        {"alarms"},
        {"prepare"},
        {"diagnostics", "parity", "resolve"},
        {"learn"},
        {"progress", "record"},
        {"cold_start", "evaluation"},
        {"assemble"},
        {"trainer"},
    ],
    "planning": [
        {"__init__", "machine", "shapes"},
        {"memory"},
        {"work"},
        {"serving"},
        {"plan"},
        {"tables", "calibration", "suggest"},
    ],
    "compare": [{"__init__", "worlds"}, {"compare"}],
}
MOST_MODULES, MOST_LINES, MOST_FUNCTION_LINES = 16, 500, 60

TRACKED = [
    ROOT / name
    for name in subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    if (ROOT / name).is_file()
]
FILES = [file for file in TRACKED if file.is_relative_to(PACKAGE)]
MODULES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
    for file in FILES
}
FOLDERS = sorted({file.parent for file in FILES})
TESTS = ROOT / "tests"
TEST_FILES = [f for f in TRACKED if f.is_relative_to(TESTS) and f.name.startswith("test_")]


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@functools.cache
def imported(module: str) -> set[str]:
    """The modules of this package that `module` imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(tree_of(MODULES[module])):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import, line {node.lineno}"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in MODULES else str(node.module))
    return {name for name in found if name.split(".")[0] == PACKAGE.name} - {module}


def parts_of(room: str) -> dict[str, str]:
    """Every module below a room, and which part of the room it belongs to."""
    prefix = ".".join([PACKAGE.name, *filter(None, [room])])
    below = {
        module: module.removeprefix(prefix).lstrip(".") or "__init__"
        for module in MODULES
        if module == prefix or module.startswith(f"{prefix}.")
    }
    return {module: rest.split(".")[0] for module, rest in below.items()}


@pytest.mark.parametrize("room", LAYERS)
def test_every_module_of_a_large_folder_has_a_layer(room):
    named = [name for layer in LAYERS[room] for name in layer]
    assert sorted(named) == sorted(set(parts_of(room).values()))


@pytest.mark.parametrize("room", LAYERS)
def test_imports_only_point_down(room):
    level = {name: number for number, layer in enumerate(LAYERS[room]) for name in layer}
    parts = parts_of(room)
    wrong = [
        f"{module} imports {other}"
        for module, part in parts.items()
        for other in imported(module) & parts.keys()
        if part != parts[other] and level[parts[other]] >= level[part]
    ]
    assert not wrong


def test_no_import_cycle():
    graphlib.TopologicalSorter({module: imported(module) for module in MODULES}).prepare()


def test_imported_modules_exist():
    wrong = [(module, other) for module in MODULES for other in imported(module) - MODULES.keys()]
    assert not wrong


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_a_folder_has_a_docstring_and_at_most_16_modules(folder):
    modules = [file for file in FILES if file.parent == folder and file.name != "__init__.py"]
    assert len(modules) <= MOST_MODULES
    assert ast.get_docstring(tree_of(folder / "__init__.py"))


@pytest.mark.parametrize("file", TRACKED, ids=lambda file: str(file.relative_to(ROOT)))
def test_lengths_and_letters(file):
    text = file.read_text(encoding="utf-8")
    assert text.isascii()
    assert len(text.splitlines()) <= MOST_LINES
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= MOST_FUNCTION_LINES, f"{node.name} has {lines} lines"


@pytest.mark.parametrize("file", TEST_FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_tests_mirror_the_tree(file):
    """tests/a/b/test_c.py or test_c_aspect.py: megatron_stare/a/b/c.py, or the folder a/b itself.

    tests/tools/, tests/benchmarks/ and the like mirror the folders next to the package;
    tests/nullcuda/ holds whole runs on the null device, named after what they run.
    """
    folder = file.parent.relative_to(ROOT / "tests")
    if folder.name == "nullcuda":
        return
    matching = [place for place in (PACKAGE / folder, ROOT / folder) if place.is_dir()]
    assert matching, f"no folder {folder} in megatron_stare/ or next to it"
    if file == TESTS / "test_architecture.py":
        return
    names = {path.stem.strip("_") for place in matching for path in place.iterdir()}
    names |= {place.name for place in matching}
    tested = file.stem.removeprefix("test_")
    assert any(tested == name or tested.startswith(f"{name}_") for name in names), (
        f"{file.name} is named after nothing in {matching[0].relative_to(ROOT)}"
    )


def test_only_topology_reads_megatrons_global_state():
    reading = [
        str(file.relative_to(PACKAGE))
        for file in FILES
        if "parallel_state" in file.read_text(encoding="utf-8")
    ]
    assert reading == ["policy/topology.py"]


def test_only_topology_pickles_values_between_ranks():
    """Data that grows with tokens travels as tensors (numerics/exchange.py)."""
    pickling = {"all_gather_object", "gather_object", "broadcast_object_list"}
    pickling |= {"scatter_object_list", "send_object_list", "recv_object_list"}
    calling = {
        str(file.relative_to(PACKAGE))
        for file in FILES
        for node in ast.walk(tree_of(file))
        if (isinstance(node, ast.Attribute) and node.attr in pickling)
        or (isinstance(node, ast.alias) and node.name in pickling)
    }
    assert calling == {"policy/topology.py"}


def test_the_first_link_of_the_readme_is_short():
    assert len((PACKAGE / "losses" / "stare.py").read_text().splitlines()) < 200


def tree_of_the_page() -> dict[str, str]:
    """Path -> caption of each line under "## The tree" of docs/architecture.md."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").split("## The tree\n")[1]
    found: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in text.strip("\n").split("\n\n")[0].splitlines():
        indent, name, caption = re.fullmatch(r"( +)(\S+)(?: +(\S.*))?", line).groups()
        above = [(depth, folder) for depth, folder in above if depth < len(indent)]
        path = "".join(folder for _, folder in above) + name
        assert path not in found, f"{path} stands twice"
        found[path] = caption
        if name.endswith("/"):
            above.append((len(indent), name))
    return found


def test_the_pages_tree_is_the_tree_on_disk():
    """Every line names an existing path; every folder of the package and next to it has a line."""
    listed = tree_of_the_page()
    assert not [path for path in listed if not (ROOT / path).exists()]
    on_disk = {f"{folder.relative_to(ROOT)}/" for folder in FOLDERS}
    on_disk |= {f"{file.relative_to(ROOT).parts[0]}/" for file in TRACKED if file.parent != ROOT}
    assert on_disk <= listed.keys()


# The headings of two walks in docs/architecture.md, and the most modules that each may have.
WALKS = {"Modules from an answer to its gradient": 33, "Modules of a weight sync": 14}


def walk_of_the_page(heading: str) -> list[str]:
    """The modules of the block below a heading of docs/architecture.md, in their order."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    paths = re.findall(r"^    (\S+)\.py {2,}\S", section, flags=re.MULTILINE)
    return [f"{PACKAGE.name}.{path.replace('/', '.')}" for path in paths]


def reached(module: str) -> set[str]:
    """The imports of a module, and those of the folders' __init__.py among them."""
    direct = imported(module)
    folders = {name for name in direct if MODULES[name].name == "__init__.py"}
    return direct.union(*(imported(folder) for folder in folders))


@pytest.mark.parametrize("heading", WALKS)
def test_the_pages_walks_are_connected_and_short(heading):
    """Each module imports, or is imported by, a module above it in the list."""
    walk = walk_of_the_page(heading)
    assert 10 <= len(walk) == len(set(walk)) <= WALKS[heading]
    assert not [module for module in walk if module not in MODULES]
    apart = [
        module
        for place, module in enumerate(walk)
        if place
        and not reached(module) & set(walk[:place])
        and not any(module in reached(before) for before in walk[:place])
    ]
    assert not apart
