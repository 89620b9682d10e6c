"""The table of objectives: in the terminal, and the same in the docs."""

from __future__ import annotations

import pytest

from megatron_stare.__main__ import main
from megatron_stare.commands.algorithms import FACTS, HEADER, declared, markdown, rows
from megatron_stare.losses.registry import all_objectives
from tests.paths import ROOT


def test_the_docs_have_the_table_that_the_code_makes() -> None:
    text = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    table = text.split("<!-- table -->\n")[1].split("<!-- end -->")[0]
    assert table.strip() == markdown().strip()


def test_the_registry_equals_the_declarations_of_the_source() -> None:
    shown = {key: HEADER.index({"confidence": "known from"}.get(key, key)) for key in FACTS}
    read = {
        name: [", ".join(facts[key]) if key == "needs" else facts[key] for key in FACTS]
        for name, facts in declared().items()
    }
    assert read == {row[0]: [row[place] for place in shown.values()] for row in rows()}
    assert list(read) == list(all_objectives())


def test_every_objective_has_a_row_and_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == list(all_objectives())
    for name, objective in all_objectives().items():
        assert main(["algorithms", name]) == 0
        page = capsys.readouterr().out
        assert page.startswith(f"{name}: {objective.family}")
        assert all(f"  {setting.key}=" in page for setting in objective.settings.values())


def test_an_unknown_name_lists_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms", "stair"]) == 2
    assert "did you mean 'stare'" in capsys.readouterr().err
