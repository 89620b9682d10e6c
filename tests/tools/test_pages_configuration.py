"""docs/configuration.md is what the sections of the configuration say."""

from __future__ import annotations

from megatron_stare.config.run import settings
from tests.paths import ROOT
from tools.pages.configuration import page


def test_the_page_is_the_sections() -> None:
    """Else: python -m tools.pages"""
    made = page()
    assert (ROOT / "docs/configuration.md").read_text(encoding="utf-8") == made
    assert all(f"| `{key.split('.', 1)[1]}` |" in made for key in settings())
