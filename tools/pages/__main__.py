"""`python -m tools.pages` writes docs/configuration.md, and the planner's parts of docs/recipes.md
and docs/scale.md.
"""

from __future__ import annotations

from pathlib import Path

from tools.pages import configuration, planner

DOCS = Path(__file__).resolve().parents[2] / "docs"


def main() -> None:
    """Rewrite the pages and print their paths."""
    found = planner.tables(DOCS)
    pages = {"configuration.md": configuration.page()}
    for name in planner.PAGES:
        pages[name] = planner.rewritten((DOCS / name).read_text(encoding="utf-8"), found)
    for name, text in pages.items():
        (DOCS / name).write_text(text, encoding="utf-8")
        print(f"written: {DOCS / name}")


if __name__ == "__main__":
    main()
