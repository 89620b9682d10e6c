"""The links, pictures, versions, foreign names, tables and sources of the pages."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

from megatron_stare.__main__ import COMMANDS
from megatron_stare.config import Config, lookup
from megatron_stare.config.aliases import ALIASES
from megatron_stare.debug.doctor import TESTED_SGLANG, pinned_versions
from megatron_stare.losses.registry import all_objectives
from megatron_stare.losses.settings import REQUIRED, Setting
from megatron_stare.policy.huggingface.families import FAMILIES
from tests.docs.pages import PAGES
from tests.docs.world import files_of_the_tutorials
from tests.paths import ROOT

# docs/configuration.md is generated from the sentences of the fields.
GENERATED = ("configuration.md",)
PROSE = [file for file in PAGES if file.name not in GENERATED]
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")
_HEADING_LINK = re.compile(r"\]\(([\w./-]*\.md)?#([^)\s]+)\)")
LARGEST_PICTURE = 150_000  # bytes
WIDEST_PROSE = 120  # columns


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def rows(text: str) -> list[list[str]]:
    """The cells of every row of its tables."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.name)
def test_links_have_targets(file: Path) -> None:
    """Including README.md and AGENTS.md, which are not part of the site."""
    links = [link for link in _LINK.findall(file.read_text(encoding="utf-8")) if "://" not in link]
    assert not [link for link in links if not (file.parent / link).exists()]


@pytest.mark.parametrize("file", PROSE, ids=lambda file: file.name)
def test_lines_of_prose_are_short(file: Path) -> None:
    """Tables and blocks of code are exempt: they cannot be wrapped."""
    assert not [line for line in prose_lines(file.read_text("utf-8")) if len(line) > WIDEST_PROSE]


def prose_lines(text: str) -> Iterator[str]:
    """The lines of a page outside of tables, fenced blocks and indented blocks."""
    fenced = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith(("|", "    ")):
            yield line


def test_prose_of_a_page_is_found() -> None:
    page = "one\n\n    make two\n\n```\nthree\n```\n| four |\n- five\n"
    assert list(prose_lines(page)) == ["one", "", "", "- five"]


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.name)
def test_links_to_headings_lead_to_headings(file: Path) -> None:
    for target, anchor in _HEADING_LINK.findall(file.read_text(encoding="utf-8")):
        page = file.parent / target if target else file
        found = [anchor_of(line) for line in page.read_text("utf-8").splitlines()]
        assert anchor in found, f"{target}#{anchor}"


def anchor_of(line: str) -> str | None:
    """The anchor that the site gives to a heading; None for other lines."""
    if not re.match("#+ ", line):
        return None
    title = re.sub(r"\]\([^)]*\)", "", line.lstrip("# "))
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip())


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text()))
    named -= {"changelog.md", "contributing.md", "slurm.md"}  # made from files outside of docs/
    assert named == {str(file.relative_to(ROOT / "docs")) for file in PAGES if "docs" in file.parts}


def test_pictures_are_small() -> None:
    pictures = list((ROOT / "docs/images").iterdir())
    assert len(pictures) >= 2
    assert all(0 < picture.stat().st_size < LARGEST_PICTURE for picture in pictures)


def test_the_versions_are_those_of_the_requirements() -> None:
    ranges = {
        found.name: str(found.specifier)
        for found in map(Requirement, metadata.requires("megatron-stare") or [])
        if found.marker is None
    }
    shown = page("install.md").split("<!-- versions -->")[1].split("<!-- end -->")[0]
    table = {name: (tested, accepted) for name, tested, accepted in rows(shown)[2:]}
    assert table.pop("SGLang (its own environment)") == (TESTED_SGLANG, "")
    assert table.pop("python") == ("3.12", ">=3.12")
    assert {"torch", "megatron-core", "transformers"} <= table.keys()
    tested = pinned_versions()
    assert table == {name: (tested[name], ranges[name]) for name in table}


def test_every_key_next_to_those_of_others_is_a_field() -> None:
    """The second column of docs/migrating.md."""
    nowhere = object()
    config, found = Config(), 0
    for cells in rows(page("migrating.md")):
        for key in re.findall(r"`([a-z_]+\.[a-z_]+)`", cells[1]):
            section, _, name = key.partition(".")
            assert getattr(getattr(config, section, nowhere), name, nowhere) is not nowhere, key
            lookup(config, key)
            found += 1
    assert found > 60


def test_a_name_of_trl_typed_as_an_override_leads_to_the_key_of_the_page() -> None:
    section = (ROOT / "docs/migrating.md").read_text().split("## From TRL\n")[1].split("\n## ")[0]
    pairs = re.findall(r"^\| (`.+?`) \| (`.+?`) \|", section, re.M)
    found = {
        theirs: ours
        for left, right in pairs
        for theirs, ours in zip(
            *(re.findall(r"`(.+?)`", cell) for cell in (left, right)), strict=True
        )
    }
    assert len(found) > 18 and found == {name: ALIASES[name] for name in found}


def test_the_objectives_have_the_defaults_of_their_table() -> None:
    """docs/algorithms.md, column `defaults`: name and default of every setting but the
    reduction, in their order.
    """

    def written(setting: Setting) -> str:
        if setting.default is REQUIRED:
            return f"{setting.name} required"
        value = setting.default
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        return f"{setting.name} {'unset' if value is None else shown}"

    text = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if line.startswith("| ")
    ]
    # other tests of this process may have registered losses of users
    ours = {
        name: one
        for name, one in all_objectives().items()
        if one.function.__module__.startswith("megatron_stare.")
    }
    listed = {row[0]: row[3] for row in rows if row[0] in ours and len(row) == 7}
    assert listed.keys() == ours.keys()
    for name, objective in ours.items():
        settings = objective.settings.values()
        own = [one for one in settings if one.name not in ("aggregation", "padded_length")]
        assert listed[name] == ", ".join(map(written, own)), name


def test_the_numbers_of_objectives_and_families_are_counted() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    others = page("comparison.md")
    assert f"| {len(all_objectives())} objectives behind one interface" in readme
    assert f"STARE and {len(all_objectives()) - 1} other [objectives]" in others
    assert len(FAMILIES) == 13 and "Thirteen [model families]" in others


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.name)
def test_a_command_within_a_sentence_is_a_command(file: Path) -> None:
    """tests/docs/table.py has those in blocks."""
    text = " ".join(file.read_text(encoding="utf-8").split())
    named = set(re.findall(r"python -m megatron_stare ([a-z-][\w-]*)", text))
    assert named <= COMMANDS.keys() | {"--version"}


def test_the_source_of_every_objective_is_in_the_index() -> None:
    shown = page("papers.md")
    for name, objective in all_objectives().items():
        assert objective.source in shown, f"{name}: {objective.source}"
        assert not objective.source or f"`loss.name={name}`" in shown


def test_the_tutorials_files_are_whole() -> None:
    found = files_of_the_tutorials()
    assert {"tiny.py", "tiny.yaml", "my_rewards.py", "my_tools.py", "my_losses.py"} <= found.keys()
    for name, text in found.items():
        if name.endswith(".py"):
            compile(text, name, "exec")


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("figures", ROOT / "tools/docs_site/figures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["figures"] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


def test_pictures_are_drawn_from_metrics(figures: ModuleType, tmp_path: Path) -> None:
    for arm in ("grpo_ds", "stare"):
        (tmp_path / "seed0" / arm).mkdir(parents=True)
        lines = [f'{{"step": {n}, "entropy": {0.5 - 0.1 * n}}}\n' for n in (1, 2)]
        lines.append('{"step": 3, "entropy": 0.2, "eval/heldout_hard/pass_at_k": 0.5}\n')
        (tmp_path / "seed0" / arm / "metrics.jsonl").write_text("".join(lines))
    runs = figures.read_runs(tmp_path)
    assert [run.arm for run in runs] == ["grpo_ds", "stare"]
    assert all(len(run.series("entropy")) == 3 for run in runs)
    figures.draw_quickstart(runs, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    figures.draw_losses(runs, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    figures.main(["--controllers", str(tmp_path), "--output", str(tmp_path)])
    assert (tmp_path / f"controllers_{tmp_path.name}.png").read_bytes().startswith(b"\x89PNG")


def test_runs_of_a_controller_are_described_in_numbers(figures: ModuleType) -> None:
    """Four of the steps after 30 are outside [0.225, 0.375]; W is 1 up to step 400, then 2."""
    rows = [{"step": n, "entropy": 0.3, "weight_w": 1 + (n > 400)} for n in range(1, 501)]
    for step in (5, 40, 41, 42, 500):
        rows[step - 1]["entropy"] = 0.2
    for step, excess in ((100, 9.0), (300, 1.0), (301, 1.5), (302, 4.0)):
        rows[step - 1]["critical_weight_excess"] = excess
    _, line = figures.describe_controllers([figures.Curves("seed0", "stare", rows)]).splitlines()
    assert line.split() == ["seed0", "stare", "4", "40", "1.00", "1.40", "2.50"]
    plain = [{key: row[key] for key in ("step", "entropy")} for row in rows]
    _, line = figures.describe_controllers([figures.Curves("seed0", "dapo", plain)]).splitlines()
    assert line.split()[2:] == ["4", "40", "nan", "nan", "nan"]
