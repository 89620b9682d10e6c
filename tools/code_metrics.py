"""Size and entanglement of the package, in numbers that a review can compare.

    python -m tools.code_metrics                   this checkout
    python -m tools.code_metrics --root ../before  another one, measured by the same script
    python -m tools.code_metrics --names           also the names that were counted

Only Python files below megatron_stare/ count, read by ast and never imported.
"""

from __future__ import annotations

import argparse
import ast
import graphlib
import io
import statistics
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.vocabulary import ROOT, checked_files, retired_words

PACKAGE = "megatron_stare"
LONG_FUNCTION, LARGE_FOLDER, SMALL_MODULE = 60, 16, 80
MOST_FOLDERS = 2  # that may hold a file of one name
SETTINGS = (f"{PACKAGE}/config/", f"{PACKAGE}/losses/settings.py")
BASE_CLASSES = {"BaseModel", "Section"}  # of configuration models


@dataclass(frozen=True)
class Module:
    """One Python file of the package."""

    name: str  # dotted; of an __init__.py the folder's
    path: Path  # below the checkout
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())


@dataclass(frozen=True)
class Metric:
    """One row of the table; `names` are what was counted, where that helps."""

    title: str
    value: str
    names: Sequence[str] = ()


def modules_of(root: Path) -> dict[str, Module]:
    """Dotted name -> every tracked or new Python file of the package in a checkout."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", f"{PACKAGE}/*.py"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    found = {}
    for path in sorted(Path(name) for name in set(listed.splitlines())):
        if (root / path).is_file():
            name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
            text = (root / path).read_text(encoding="utf-8")
            found[name] = Module(name, path, text, ast.parse(text))
    return found


def kinds_of_lines(module: Module) -> Counter[str]:
    """The numbers of lines that are code, docstring, comment and blank; a line counts once."""
    docstrings: set[int] = set()
    for node in ast.walk(module.tree):
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) and (ast.get_docstring(node, clean=False) is not None):
            docstrings |= {*range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    comments = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(module.text).readline)
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")
    }
    counts: Counter[str] = Counter()
    for number, line in enumerate(module.text.splitlines(), start=1):
        if number in docstrings:
            counts["docstring"] += 1
        elif number in comments:
            counts["comment"] += 1
        else:
            counts["code" if line.strip() else "blank"] += 1
    return counts


def imports_of(module: Module, modules: Mapping[str, Module]) -> set[str]:
    """The package's modules that one imports, at its top or inside a function."""
    found: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                found.add(below if below in modules else str(node.module))
    return (found & modules.keys()) - {module.name}


def long_functions(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > LONG_FUNCTION:
                yield f"{module.path}:{node.name} ({lines})"


def config_fields(modules: Mapping[str, Module]) -> list[str]:
    """`Class.field` of every section's model: a dataclass, or a pydantic model."""
    classes = {
        node.name: node
        for module in modules.values()
        if str(module.path).startswith(SETTINGS)
        for node in module.tree.body
        if isinstance(node, ast.ClassDef)
    }
    return [
        f"{name}.{line.target.id}"
        for name, node in classes.items()
        if name.endswith("Config") or _is_model(node, classes)
        for line in node.body
        if isinstance(line, ast.AnnAssign)
        and isinstance(line.target, ast.Name)
        and not line.target.id.startswith("_")
        and "ClassVar" not in ast.unparse(line.annotation)
    ]


def _is_model(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> bool:
    bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
    return bool(bases & BASE_CLASSES) or any(
        _is_model(classes[base], classes) for base in bases if base in classes
    )


def import_cycle(imports: Mapping[str, set[str]]) -> list[str]:
    """The modules of one cycle of imports; none if there is no cycle."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def size_metrics(modules: Mapping[str, Module]) -> list[Metric]:
    lines = sum((kinds_of_lines(module) for module in modules.values()), Counter[str]())
    by_size = sorted(modules.values(), key=lambda module: module.lines)
    long = [name for module in modules.values() for name in long_functions(module)]
    return [
        Metric("files", f"{len(modules)}"),
        Metric("lines", f"{lines.total():,}"),
        *(
            Metric(f"  {kind}", f"{lines[kind]:,}")
            for kind in ("code", "docstring", "comment", "blank")
        ),
        Metric("median file, lines", f"{statistics.median(each.lines for each in by_size):.0f}"),
        Metric("largest file, lines", f"{by_size[-1].lines}", [str(by_size[-1].path)]),
        Metric(f"functions over {LONG_FUNCTION} lines", f"{len(long)}", long),
    ]


def structure_metrics(modules: Mapping[str, Module]) -> list[Metric]:
    files = [module.path for module in modules.values() if module.path.name != "__init__.py"]
    folders = Counter(str(path.parent) for path in files)
    crowded = [f"{folder} ({n})" for folder, n in folders.items() if n > LARGE_FOLDER]
    imports = {name: imports_of(module, modules) for name, module in modules.items()}
    importers = Counter(other for found in imports.values() for other in found)
    single = [modules[name] for name, count in importers.items() if count == 1]
    single = [module for module in single if module.path.name != "__init__.py"]
    small = [f"{each.path} ({each.lines})" for each in single if each.lines < SMALL_MODULE]
    cycle = import_cycle(imports)
    return [
        Metric(f"folders over {LARGE_FOLDER} modules", f"{len(crowded)}", crowded),
        Metric("modules with one importer", f"{len(single)}"),
        Metric(f"  of them under {SMALL_MODULE} lines", f"{len(small)}", sorted(small)),
        Metric("modules in an import cycle", f"{len(cycle)}", cycle),
    ]


def name_metrics(root: Path, modules: Mapping[str, Module]) -> list[Metric]:
    classes = Counter(
        node.name
        for module in modules.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    )
    repeated = [f"{name} ({count})" for name, count in sorted(classes.items()) if count > 1]
    folders = defaultdict(set)
    for module in modules.values():
        if module.path.name != "__init__.py":
            folders[module.path.name].add(module.path.parent)
    spread = [
        f"{name} ({len(found)})" for name, found in folders.items() if len(found) > MOST_FOLDERS
    ]
    words = Counter(
        found.word.lower()
        for file in checked_files(root, [PACKAGE])
        for found in retired_words(file.read_text(encoding="utf-8"))
    )
    fields = config_fields(modules)
    return [
        Metric("class names that occur twice", f"{len(repeated)}", repeated),
        Metric(f"file names in over {MOST_FOLDERS} folders", f"{len(spread)}", sorted(spread)),
        Metric("retired words", f"{words.total():,}", [f"{w} ({n})" for w, n in words.items()]),
        Metric("config fields", f"{len(fields)}"),
    ]


def metrics_of(root: Path) -> list[Metric]:
    """Every row of the table, for the checkout at `root`."""
    modules = modules_of(root)
    if not modules:
        raise SystemExit(f"--root {root}: no Python file of {PACKAGE}/ is there")
    return [*size_metrics(modules), *structure_metrics(modules), *name_metrics(root, modules)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="How large and how entangled the package is.")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to measure")
    parser.add_argument("--names", action="store_true", help="list what was counted")
    chosen = parser.parse_args(arguments)
    for metric in metrics_of(chosen.root.resolve()):
        print(f"{metric.title:34}{metric.value:>8}")
        for name in metric.names if chosen.names else ():
            print(f"    {name}")


if __name__ == "__main__":
    sys.exit(main())
