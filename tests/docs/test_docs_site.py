"""The built site: its search finds the words that readers type, formulas and tables are rendered,
and nothing is loaded from the network.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.browser import axe_findings, chromium
from tests.paths import ROOT

PYTHON = ROOT / ".venv-docs/bin/python"
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="needs .venv-docs (make docs)")

WORDS = (
    *("parquet", "jsonl", "hf_checkpoint", "prompt_data", "OOM", "docker", "resume", "wandb"),
    *("verl", "slime", "slurm", "sandbox", "checkpoint", "entropy", "grpo", "fp8", "notebook"),
    *("target_entropy", "evaluate", "lora"),
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    target = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [PYTHON, "-m", "mkdocs", "build", "--strict", "--site-dir", target],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def tokens(site: Path) -> set[str]:
    """The searchable words: the index, split as its separator says."""
    index = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))
    separator = re.compile(index["config"]["separator"])
    texts = (re.sub(r"<[^>]+>", " ", doc["title"] + " " + doc["text"]) for doc in index["docs"])
    return {token.lower() for text in texts for token in separator.split(text)}


@pytest.mark.parametrize("word", WORDS)
def test_the_search_finds_pages(tokens: set[str], word: str) -> None:
    assert word.lower() in tokens


def test_formulas_are_mathml(site: Path) -> None:
    page = (site / "theory.html").read_text(encoding="utf-8")
    assert page.count("<math") > 40 and "arithmatex" not in page and r"\frac" not in page


def test_cells_have_the_heading_of_their_column(site: Path) -> None:
    page = (site / "metrics.html").read_text(encoding="utf-8")
    cells = re.findall(r"<td[ >][^>]*", page)
    assert len(cells) > 100 and all("data-label=" in cell for cell in cells)


def test_every_page_has_the_version_and_a_link_to_the_changelog(site: Path) -> None:
    for name, up in (("index.html", ""), ("tutorials/data.html", "../")):
        page = (site / name).read_text(encoding="utf-8")
        assert re.search(rf'megatron_stare \d+\.\d+\.\d+ - <a href="{up}changelog.html">', page)
    assert (site / "changelog.html").is_file()


def test_the_site_loads_nothing_from_the_network(site: Path) -> None:
    loaded = re.compile(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(https?:[^"]*)"')
    for page in site.rglob("*.html"):
        assert not loaded.findall(page.read_text(encoding="utf-8")), page.name


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_has_no_serious_finding_on_the_home_page(site: Path, scheme: str, width: int) -> None:
    with chromium() as browser:
        page = browser.new_page(
            color_scheme=scheme, reduced_motion="reduce", viewport={"width": width, "height": 900}
        )
        page.goto((site / "index.html").as_uri())
        page.wait_for_selector("h1")
        assert axe_findings(page) == []
