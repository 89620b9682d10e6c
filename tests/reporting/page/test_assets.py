"""The page in a real browser: its content for every reader, without any network request.

Needs Chromium (CHROMIUM, or on the PATH) and playwright's Python package: make browser.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import threading

import pytest

from benchmarks._synthetic_run import write_alarm, write_run
from megatron_stare.reporting.report import server, write_report
from tests.reporting.page.test_render import HOSTILE

pytestmark = pytest.mark.browser
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    if not CHROMIUM:
        pytest.skip("no Chromium: tools/browser/install")
    with playwright.sync_playwright() as started:
        # Without a sandbox of its own: it may run as root, and opens only what these tests wrote.
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


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
        "empty": write_run(base / "empty", 0),
    }
    write_alarm(runs["many"], 120)
    seeds: dict = {"0": {}, "1": {}, "2": {}}
    for seed, arms in seeds.items():
        for arm in ("grpo_ds", "stare"):
            write_run(base / "all" / f"seed{seed}" / arm, 60, loss=arm, seed=int(seed))
            arms[arm] = {"entropy_final": 0.3 + int(seed) / 10, "steps": 60}
    summary = {"target_entropy": 0.3, "seeds": seeds, "caveats": [HOSTILE[0]]}
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


@pytest.mark.parametrize("name", ["one", "many", "plain", "long", "hostile", "empty", "all", "two"])
def test_every_page_fits_from_phone_to_desk_and_is_in_order(opened, name):
    page = opened(name)
    for width in (1280, 360):
        page.set_viewport_size({"width": width, "height": 800})
        page.wait_for_timeout(150)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map(e => +e.tagName[1])")
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll('button,select,input,[role=img],[tabindex="0"]')]
        .filter(e => !(e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.length))
        .map(e => e.outerHTML)"""
    )
    assert unnamed == []
    repeated = page.evaluate(
        """() => [...document.querySelectorAll('[id]')].map(e => e.id)
        .filter((id, at, all) => all.indexOf(id) !== at)"""
    )
    assert repeated == []


def test_the_accessibility_tree_has_figures_headings_and_choices(opened):
    page = opened("many")
    tree = page.locator("main").aria_snapshot()
    for line in (
        '- heading "STARE run" [level=1]',
        '- heading "Policy entropy" [level=3]',
        '- heading "Predicted and realised change of entropy" [level=2]',
        '- slider "Step"',
        '- button "Next marked token"',
        '- table "Quadrants of 20000 tokens"',
    ):
        assert line in tree, line
    assert re.search(r'- img "Policy entropy, nats per token\. STARE ends at 0\.\d+"', tree)


def test_a_section_that_is_jumped_to_is_not_under_the_legend(opened):
    page = opened("two", reduced_motion="reduce")
    for width in (1280, 360):
        page.set_viewport_size({"width": width, "height": 700})
        page.wait_for_timeout(150)
        for place in page.evaluate("[...document.querySelectorAll('nav a')].map(e => e.hash)"):
            page.evaluate("place => { location.hash = ''; location.hash = place }", place)
            legend, heading = page.evaluate(
                """place => [document.querySelector('.legend').getBoundingClientRect().bottom,
                document.querySelector(`${place} h2`).getBoundingClientRect().top]""",
                place,
            )
            assert heading >= legend, (width, place)


def test_figures_are_read_by_the_arrow_keys(opened):
    page = opened("many")
    figure = page.locator("figure", has=page.get_by_role("heading", name="Policy entropy"))
    figure.locator(".canvas").focus()
    page.keyboard.press("End")
    last = figure.locator(".readout").inner_text()
    page.keyboard.press("Home")
    assert last.startswith("200") and figure.locator(".readout").inner_text().startswith("1")
    assert figure.locator(".cursor").count() == 1


def test_arms_are_shown_and_hidden_by_keyboard_in_all_figures(opened):
    page = opened("two")
    button = page.get_by_role("button", name="GRPO-ds")
    lines = page.locator("#entropy path.line")
    assert lines.count() == 2 and button.get_attribute("aria-pressed") == "true"
    dashes = {lines.nth(at).get_attribute("stroke-dasharray") or "" for at in (0, 1)}
    assert len(dashes) == 2, "told apart without colour"
    button.focus()
    page.keyboard.press("Enter")
    assert lines.count() == 1 and button.get_attribute("aria-pressed") == "false"
    page.get_by_role("button", name="STARE").press("Space")
    assert "hidden" in page.locator("#entropy .canvas").inner_text()
    page.keyboard.press("Space")
    assert lines.count() == 1


def test_rollouts_are_browsed_by_keyboard_and_by_pointer(opened):
    page = opened("many")
    page.get_by_role("button", name="Previous", exact=True).press("Enter")
    assert page.evaluate("document.activeElement.id") == "rollout-before"
    conversation = page.locator(".tokens")
    roles = conversation.locator("h3").all_inner_texts()
    assert roles[:3] == ["system", "user", "policy"] and roles[3].startswith("environment")
    conversation.focus()
    detail = page.locator(".token-detail")
    page.keyboard.press("ArrowRight")
    for name in ("surprisal", "entropy", "advantage", "weight", "token 1"):
        assert name in detail.inner_text()
    page.keyboard.press("PageDown")
    current = page.locator(".token.current")
    assert current.count() == 1 and re.search("plus|minus", current.get_attribute("class"))
    assert "in L" in detail.inner_text()
    mark = current.evaluate("e => getComputedStyle(e, '::after').content")
    assert mark in ('"+"', '"\u2212"'), "marked without colour"
    conversation.locator(".environment .token").first.hover()
    assert "not trained on" in detail.inner_text()
    page.get_by_label("Shade by").select_option("change")
    assert page.locator(".tokens .up-3, .tokens .down-3").count() >= 1


def test_the_slider_goes_from_step_to_step(opened):
    page = opened("many")
    page.locator("#inside-step").press("Home")
    assert page.locator("#inside output").inner_text() == "step 50"
    assert page.locator("#inside .plot").count() == 4


def test_hostile_texts_are_shown_as_texts(opened):
    page = opened("hostile")
    assert page.locator("main script").count() == 0 and page.locator("script").count() == 2
    shown = page.locator(".tokens").inner_text()
    assert "</script><script>alert(1)</script>" in shown and "&lt;b&gt;" in shown
    assert "[U+202E]reversed[U+2066]" in shown and "[U+0000][U+0007][U+001B]" in shown
    assert "\u202e" not in shown and "\ufffd alone, \ufffd too" in shown


LUMINANCE = """name => {
  const probe = document.createElement('i');
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const parts = getComputedStyle(probe).color.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255);
  probe.remove();
  const [r, g, b] = parts.map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_in_both_schemes(opened, scheme):
    page = opened("plain", color_scheme=scheme)

    def contrast(name):
        one, other = sorted(page.evaluate(LUMINANCE, each) + 0.05 for each in (name, "--paper"))
        return other / one

    texts = ("--ink", "--soft", "--muted", "--focus")
    lines = (*(f"--arm-{place}" for place in range(10)), "--rise", "--fall", "--ink-blue")
    assert {name: contrast(name) for name in texts if contrast(name) < 4.5} == {}
    assert {name: contrast(name) for name in lines if contrast(name) < 3} == {}
    assert (page.evaluate(LUMINANCE, "--paper") < 0.1) == (scheme == "dark")


def test_print_is_whole_and_light(opened):
    page = opened("many", color_scheme="dark")
    page.emulate_media(media="print")
    assert page.locator("nav").is_hidden() and page.locator("#rollout-next").is_hidden()
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == (
        "rgb(255, 255, 255)"
    )
    assert page.locator(".tokens").evaluate("e => e.scrollHeight <= e.clientHeight + 1")
    assert page.pdf(format="A4").startswith(b"%PDF")


def test_seeds_are_thin_lines_under_their_mean(opened):
    page = opened("all")
    page.wait_for_selector("#entropy path.line.thin", state="attached")  # figures come one by one
    assert page.locator("#entropy path.line.thin").count() == 6
    assert page.locator("#entropy path.line:not(.thin)").count() == 2
    assert page.locator("#entropy path.band").count() == 2
    assert "\u00b1" in page.locator("#results table").inner_text()
    assert "</script>" in page.locator(".finding.failed").inner_text()


def test_what_is_thinned_says_so(opened):
    assert "buckets" in opened("long").locator("#entropy").inner_text()
    assert "buckets" not in opened("plain").locator("#entropy").inner_text()
    assert "diagnostics.interval" in opened("plain").locator("#rollouts").inner_text()


def test_a_live_page_follows_its_run(browser, tmp_path):
    write_run(tmp_path, 3)
    with server([tmp_path], 0) as serving:
        thread = threading.Thread(target=serving.serve_forever, args=(0.02,))
        thread.start()
        page = browser.new_page()
        said, asked = [], []
        page.on("console", lambda message: said.append(message.text))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"http://127.0.0.1:{serving.server_port}/")
        page.wait_for_selector("#entropy path.line")
        write_run(tmp_path, 9)
        # the page's policy allows no evaluated text, so that a selector has to wait
        page.wait_for_selector("#entropy circle:nth-of-type(9)", timeout=60_000)
        page.close()
        serving.shutdown()
        thread.join()
    assert said == [] and len(asked) > 1
    assert set(asked) == {f"http://127.0.0.1:{serving.server_port}/"}
