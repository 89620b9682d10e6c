"""The page in a real browser: its content for every reader, without any network request.

Needs Chromium (CHROMIUM, or on the PATH) and playwright's Python package: make browser.
"""

from __future__ import annotations

import itertools
import re
import threading

import pytest

from benchmarks._synthetic_run import write_run
from megatron_stare.reporting.report import server
from tests.browser import axe_findings, pixels

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("name", ["one", "many", "plain", "long", "hostile", "empty", "all", "two"])
def test_every_page_fits_from_phone_to_desk_and_is_in_order(opened, name):
    page = opened(name)
    for width in (1280, 360):
        page.set_viewport_size({"width": width, "height": 800})
        page.wait_for_timeout(150)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        cut = "[...document.querySelectorAll(SELECTOR)].filter(e => e.scrollWidth > e.clientWidth)"
        tables = "'.wide'" if width > 600 else "'.cards'"
        assert page.evaluate(cut.replace("SELECTOR", tables) + ".length") == 0, "a table is cut"
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


def test_a_link_to_a_section_shows_it_below_the_legend(opened):
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


def test_the_page_describes_the_run(opened):
    text = opened("two").locator("#about").inner_text()
    assert "Settings on which the arms differ" in text and "loss.name" in text
    assert "not recorded" in text, "these runs were written without starting any"


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
    assert pixels(page, "--arm-1") > 100
    page.emulate_media(color_scheme="light" if scheme == "dark" else "dark")
    assert pixels(page, "--arm-1") > 100, "a plot changes its colours with the page"


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["two", "all", "empty"])
def test_axe_has_no_serious_finding(opened, name, scheme, width):
    page = opened(name, color_scheme=scheme, reduced_motion="reduce")
    page.set_viewport_size({"width": width, "height": 900})
    for element in page.locator("details").all():
        element.evaluate("e => { e.open = true }")
    if page.locator("#group").count():
        page.locator("#group").click()
    assert axe_findings(page) == []


def test_print_is_whole_and_light(opened):
    page = opened("many", color_scheme="dark")
    page.emulate_media(media="print")
    assert pixels(page, "--arm-0") > 100, "in the colours of paper"
    assert page.locator("nav").is_hidden() and page.locator("#rollout-next").is_hidden()
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == (
        "rgb(255, 255, 255)"
    )
    assert page.locator(".tokens").evaluate("e => e.scrollHeight <= e.clientHeight + 1")
    assert page.pdf(format="A4").startswith(b"%PDF")


def test_the_page_says_which_figures_are_thinned(opened):
    assert "buckets" in opened("long").locator("#entropy").inner_text()
    assert "buckets" not in opened("plain").locator("#entropy").inner_text()
    assert "diagnostics.interval" in opened("plain").locator("#rollouts").inner_text()


def test_a_live_page_follows_its_run(browser, tmp_path):
    write_run(tmp_path, 3, every=1)
    with server([tmp_path], 0) as serving:
        thread = threading.Thread(target=serving.serve_forever, args=(0.02,))
        thread.start()
        page = browser.new_page()
        said, asked = [], []
        page.on("console", lambda message: said.append(message.text))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"http://127.0.0.1:{serving.server_port}/")
        page.wait_for_selector("#entropy .uplot")
        page.locator("#rollout-next").click()
        shown = page.locator(".hits [aria-current] span").first
        chosen = shown.inner_text()
        page.locator("h1").scroll_into_view_if_needed()  # what is far from the screen is not drawn
        write_run(tmp_path, 9, every=1)
        # the page's policy allows no evaluated text, so that a selector has to wait
        page.wait_for_selector("#entropy .readout b:text-is('9')", timeout=60_000)
        assert shown.inner_text() == chosen == "step 3, problem 30, sample 1", "it stays open"
        page.close()
        serving.shutdown()
        thread.join()
    assert said == [] and len(asked) > 1
    assert set(asked) == {f"http://127.0.0.1:{serving.server_port}/"}
