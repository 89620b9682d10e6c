"""Pages of runs in a real browser, for all tests of the assets."""

from __future__ import annotations

import json

import pytest

from benchmarks._synthetic_run import write_alarm, write_run
from megatron_stare.reporting.report import write_report
from tests.browser import chromium
from tests.reporting.test_report_page import HOSTILE


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


def hostile_texts(count):
    """As many different texts that would set window.struck if any of them were more than text."""
    attack = "window.struck={}"
    forms = (
        "</script><script>{}</script>",
        "<img src=x onerror={}>",
        "<svg/onload={}>",
        "\"'><iframe srcdoc='<script>{}</script>'>",
        "javascript:{}//",
        "<!--<script>{}</script>-->",
        "${{}}`{}`",
        "\u202e<b onmouseover={}>\u0000",
    )
    return tuple(forms[at % len(forms)].replace("{}", attack.format(at)) for at in range(count))


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """{name: path of its page}."""
    base = tmp_path_factory.mktemp("reports")
    runs = {
        "one": write_run(base / "one", 1, every=1, evaluations=False),
        "many": write_run(base / "many", 200, every=50),
        "plain": write_run(base / "plain", 30, loss="grpo_ds"),
        "long": write_run(base / "long", 2000, every=500, rollouts=1),
        "hostile": write_run(base / "hostile", 4, every=2, tokens=60, texts=HOSTILE),
        "hostile_many": write_run(
            base / "hostile_many", 2, every=2, tokens=4000, rollouts=4, texts=hostile_texts(16_000)
        ),
        "empty": write_run(base / "empty", 0),
    }
    write_alarm(runs["many"], 120)
    seeds: dict = {"0": {}, "1": {}, "2": {}}
    for seed, arms in seeds.items():
        for arm in ("grpo_ds", "stare"):
            write_run(base / "all" / f"seed{seed}" / arm, 60, loss=arm, seed=int(seed))
            arms[arm] = {"entropy_final": 0.3 + int(seed) / 10, "steps": 60}
            arms[arm] |= {"target_entropy": 0.3}
    summary = {"seeds": seeds, "caveats": [HOSTILE[0]]}
    (base / "all" / "summary.json").write_text(json.dumps(summary))
    pages = {name: write_report([run]) for name, run in (runs | {"all": base / "all"}).items()}
    return pages | {"two": write_report([runs["many"], runs["plain"]], base / "two.html")}


@pytest.fixture
def opened(browser, reports):
    """A function that opens a page by name; afterwards: no error was said, nothing was fetched."""
    said: list[str] = []
    asked: list[str] = []
    contexts = []

    def open_page(name, **settings):
        context = browser.new_context(viewport={"width": 1280, "height": 900}, **settings)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(180_000)  # of milliseconds: a busy machine is slow
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(reports[name].as_uri())
        page.wait_for_selector("h1")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
