"""The page in a real browser: its content for every reader, without any network request.

Needs Chromium (CHROMIUM, or on the PATH) and playwright's Python package: make browser.
"""

from __future__ import annotations

import csv
import itertools
import json
import re
import threading

import pytest

from benchmarks._synthetic_run import write_alarm, write_run
from megatron_stare.reporting.report import server, write_report
from tests.browser import axe_findings, chromium
from tests.reporting.page.test_render import HOSTILE

pytestmark = pytest.mark.browser


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
    readout = figure.locator(".readout")
    drawn(page)
    assert readout.inner_text().startswith("200"), "without a cursor the last step is read"
    figure.locator(".canvas").focus()
    page.keyboard.press("Home")
    assert re.match(r"1\D", readout.inner_text())
    page.keyboard.press("ArrowRight")
    assert re.match(r"2\D", readout.inner_text())
    page.keyboard.press("PageDown")
    assert readout.inner_text().startswith("12")
    page.keyboard.press("End")
    assert readout.inner_text().startswith("200")
    assert figure.locator(".u-cursor-x:not(.u-off)").count() == 1


def test_a_heat_map_is_read_cell_by_cell(opened):
    page = opened("many")
    page.locator("#inside").scroll_into_view_if_needed()
    figure = page.locator("figure", has=page.get_by_role("heading", name="Tokens by surprisal"))
    figure.locator(".uplot").wait_for()
    figure.locator(".canvas").focus()
    reads = []
    for key in ("Home", "ArrowRight", "PageDown", "End"):
        page.keyboard.press(key)
        reads.append(re.findall(r"[\d.]+|\u2212[\d.]+", figure.locator(".readout").inner_text()))
    first, right, above, last = reads
    assert first[:2] != right[:2] and first[2:4] == right[2:4], "another column of the same row"
    assert above[:2] == right[:2] and above[2:4] != right[2:4], "another row of the same column"
    assert last[:4] not in (first[:4], above[:4])


# The pixels of a figure's canvas that have a colour of the style sheet, give or take what
# antialiasing does.
PIXELS = """([selector, name]) => {
  const canvas = document.querySelector(`${selector} canvas`);
  const text = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const wanted = [1, 3, 5].map(at => parseInt(text.slice(at, at + 2), 16));
  const copy = document.createElement('canvas');
  [copy.width, copy.height] = [canvas.width, canvas.height];
  const context = copy.getContext('2d', {willReadFrequently: true});
  context.drawImage(canvas, 0, 0);
  const {data} = context.getImageData(0, 0, copy.width, copy.height);
  let found = 0;
  for (let at = 0; at < data.length; at += 4)
    if (data[at + 3] > 200 && wanted.every((value, c) => Math.abs(data[at + c] - value) < 12))
      found += 1;
  return found;
}"""
PICTURE = "selector => document.querySelector(`${selector} canvas`).toDataURL()"
ENTROPY = "#entropy figure"


def drawn(page, selector=ENTROPY):
    page.wait_for_selector(f"{selector} canvas")
    page.wait_for_timeout(60)


def pixels(page, name, selector=ENTROPY):
    drawn(page, selector)
    return page.evaluate(PIXELS, [selector, name])


def test_arms_are_shown_and_hidden_by_keyboard_in_all_figures(opened):
    page = opened("two")
    stare, other = (
        page.get_by_role("button", name=name, exact=True) for name in ("STARE", "GRPO-ds")
    )
    assert pixels(page, "--arm-0") > 300 and pixels(page, "--arm-1") > 100
    dashes = page.eval_on_selector_all(
        ".legend .swatch line", "all => all.map(e => e.getAttribute('stroke-dasharray'))"
    )
    assert len(set(dashes)) == 2, "told apart without colour"
    assert other.get_attribute("aria-pressed") == "true"
    other.focus()
    page.keyboard.press("Enter")
    assert pixels(page, "--arm-1") == 0 and other.get_attribute("aria-pressed") == "false"
    assert pixels(page, "--arm-0") > 300
    label = page.locator("#entropy .uplot").get_attribute("aria-label")
    assert "STARE ends at" in label and "GRPO-ds" not in label
    stare.press("Space")
    assert "hidden" in page.locator("#entropy .canvas").inner_text()
    page.keyboard.press("Space")
    assert pixels(page, "--arm-0") > 300


def test_a_zoom_holds_in_every_figure_over_steps(opened):
    page = opened("many")
    drawn(page)
    over = page.locator("#entropy .u-over").bounding_box()
    y = over["y"] + over["height"] / 2
    page.mouse.move(over["x"] + over["width"] * 0.25, y)
    page.mouse.down()
    page.mouse.move(over["x"] + over["width"] * 0.5, y, steps=4)
    page.mouse.up()
    page.wait_for_timeout(100)
    low, high = (int(page.locator(f"#zoom-{end}").input_value()) for end in (0, 1))
    assert abs(low - 51) <= 2 and abs(high - 101) <= 2
    reward = page.locator("figure", has=page.get_by_role("heading", name="Training reward"))
    reward.scroll_into_view_if_needed()
    reward.locator(".uplot").wait_for()
    assert reward.locator(".readout").inner_text().startswith(f"{high}")
    reward.locator(".canvas").press("Home")
    assert reward.locator(".readout").inner_text().startswith(f"{low}")
    page.locator("#zoom-1").fill("60")
    page.locator("#zoom-1").press("Enter")
    assert reward.locator(".readout").inner_text().startswith("60")
    page.get_by_role("button", name="All steps").click()
    assert page.locator("#zoom-0").input_value() == ""
    assert reward.locator(".readout").inner_text().startswith("200")


def test_smoothing_and_the_log_axis_change_the_curve_and_not_the_data(opened, reports):
    page = opened("plain")
    drawn(page)
    raw = page.evaluate(PICTURE, ENTROPY)
    smoothing = 0.9
    page.locator("#smoothing").evaluate(
        "(e, value) => { e.value = value; e.dispatchEvent(new Event('input')) }", smoothing
    )
    drawn(page)
    rows = metrics_of(reports["plain"].parent)
    total = weight = 0.0
    for row in rows:
        total = total * smoothing + row["entropy"] * (1 - smoothing)
        weight = weight * smoothing + 1 - smoothing
    said = page.locator("#entropy .readout").inner_text()
    assert float(re.search(r"smoothed ([\d.]+)", said)[1]) == pytest.approx(
        total / weight, rel=1e-3
    )
    assert f"GRPO-ds {rows[-1]['entropy']:.4g}," in said
    smooth = page.evaluate(PICTURE, ENTROPY)
    page.get_by_role("button", name="Log axis").click()
    drawn(page)
    assert len({raw, smooth, page.evaluate(PICTURE, ENTROPY)}) == 3


def metrics_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_figure_is_saved_as_numbers_and_as_a_picture(opened, reports, tmp_path):
    page = opened("plain")
    drawn(page)
    for kind in ("CSV", "PNG"):
        with page.expect_download() as download:
            page.get_by_role("button", name=f"Policy entropy: save as {kind}").click()
        download.value.save_as(tmp_path / kind)
        assert download.value.suggested_filename == f"policy_entropy.{kind.lower()}"
    head, *lines = csv.reader((tmp_path / "CSV").read_text().splitlines())
    assert head == ["step", "GRPO-ds"]
    rows = metrics_of(reports["plain"].parent)
    saved = [(int(step), float(value)) for step, value in lines]
    assert saved == [(row["step"], float(f"{row['entropy']:.5g}")) for row in rows]
    picture = (tmp_path / "PNG").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 5000


def test_the_numbers_are_a_grid_that_is_searched(opened):
    page = opened("many")
    grid = page.locator("#numbers figure")
    assert grid.count() == 12
    page.get_by_role("button", name=re.compile("Show [0-9]+ more")).click()
    everything = grid.count()
    assert everything > 20
    page.locator("#numbers-search").fill("QUADRANT rising")
    names = page.locator("#numbers h3").all_inner_texts()
    assert names and all("quadrant" in name and "rising" in name for name in names)
    page.locator("#numbers-search").fill("no such metric")
    assert (
        grid.count() == 0 and f"0 of {everything} metrics" in page.locator("#numbers").inner_text()
    )


def test_what_ran_is_on_the_page(opened):
    text = opened("two").locator("#about").inner_text()
    assert "Settings on which the arms differ" in text and "loss.name" in text
    assert "not recorded" in text, "these runs were written without starting any"


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


def test_rollouts_are_filtered_and_searched(opened, reports):
    page = opened("many")
    shown = page.locator(".hits li")
    everything = shown.count()
    said = page.locator(".hits [role=status]")
    assert said.inner_text() == f"{everything} of {everything} rollouts"
    page.get_by_label("Verdict").select_option("wrong")
    wrong = shown.count()
    assert 0 < wrong < everything and shown.locator(".right").count() == 0
    page.locator("#rollout-step").select_option("50")
    assert 0 < shown.count() < wrong and all("step 50" in t for t in shown.all_inner_texts())
    page.get_by_label("Reward from").fill("0.5")
    assert said.inner_text() == f"0 of {everything} rollouts", "a wrong one has reward 0"
    assert page.locator(".rollout").inner_text() == ""
    page.get_by_label("Reward from").fill("")
    page.get_by_label("Verdict").select_option("")
    page.locator("#rollout-search").fill("ROOTS")
    assert shown.count() > 0
    page.locator("#rollout-search").fill("in no rollout")
    assert shown.count() == 0


def test_a_groups_answers_stand_next_to_each_other(opened):
    page = opened("many")
    page.locator("#group").press("Enter")
    answers = page.locator(".answer")
    assert answers.count() == 2 and page.locator(".answer.current").count() == 1
    tops = {round(box["y"]) for box in (answers.nth(at).bounding_box() for at in range(2))}
    assert len(tops) == 1, "side by side"
    second = answers.nth(1).get_by_role("button").inner_text()
    answers.nth(1).get_by_role("button").click()
    assert answers.count() == 0 and page.evaluate("document.activeElement.id") == "group"
    assert second.split(":")[0] in page.locator(".hits [aria-current]").inner_text()


def test_the_slider_goes_from_step_to_step(opened):
    page = opened("many")
    page.locator("#inside-step").press("Home")
    assert page.locator("#inside output").inner_text() == "step 50"
    page.locator("#inside").scroll_into_view_if_needed()
    page.locator("#inside .uplot").nth(3).wait_for()
    assert page.locator("#inside .uplot").count() == 4


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


def test_sixteen_thousand_hostile_texts_have_no_effect(opened):
    """Each is shown, searched and listed next to its group; `opened` fails at the first word on the
    console or request. A script that ran would leave its mark on the window.
    """
    page = opened("hostile_many")
    for click in ("#group", "#group", "#rollout-next"):
        page.locator(click).click()
    page.locator("#rollout-search").fill("window.struck")
    assert page.locator(".hits li").count() > 0
    assert page.locator("script, iframe, object, embed, base").count() == 2, "the page's own two"
    assert page.locator("img, [onerror], [onload], [style*=url]").count() == 0
    assert page.evaluate("'struck' in window") is False


def test_seeds_are_thin_lines_under_their_mean(opened):
    page = opened("all")
    assert pixels(page, "--arm-0") > 300 and pixels(page, "--arm-1") > 100
    label = page.locator("#entropy .uplot").get_attribute("aria-label")
    assert len(re.findall(r"seed \d ends", label)) == 6 and len(re.findall("mean ends", label)) == 2
    read = page.locator("#entropy .readout").inner_text()
    assert "seed" not in read and len(re.findall(r"mean [\d.]+ \([\d.]+ to [\d.]+\)", read)) == 2
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
        page.wait_for_selector("#entropy .uplot")
        write_run(tmp_path, 9)
        # the page's policy allows no evaluated text, so that a selector has to wait
        page.wait_for_selector("#entropy .readout b:text-is('9')", timeout=60_000)
        page.close()
        serving.shutdown()
        thread.join()
    assert said == [] and len(asked) > 1
    assert set(asked) == {f"http://127.0.0.1:{serving.server_port}/"}
