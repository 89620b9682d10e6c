"""Figures in a real browser: read, zoomed, smoothed, searched and saved.

Needs Chromium (CHROMIUM, or on the PATH) and playwright's Python package: make browser.
"""

from __future__ import annotations

import csv
import json
import re

import pytest

from tests.browser import ENTROPY, PICTURE, drawn, pixels

pytestmark = pytest.mark.browser


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


def test_arms_are_shown_and_hidden_by_keyboard_in_all_figures(opened):
    page = opened("two")
    stare, other = (
        page.get_by_role("button", name=name, exact=True) for name in ("STARE", "GRPO-ds")
    )
    assert pixels(page, "--arm-0") > 300 and pixels(page, "--arm-1") > 100
    dashes = page.eval_on_selector_all(
        ".legend .swatch line", "all => all.map(e => e.getAttribute('stroke-dasharray'))"
    )
    assert len(set(dashes)) == 2, "distinct without colour"
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


def test_a_zoom_applies_to_every_figure_over_steps(opened):
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
    page.get_by_role("button", name="Log axis").click()  # no later click ends the old drag again
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


def test_the_slider_goes_from_step_to_step(opened):
    page = opened("many")
    page.locator("#inside-step").press("Home")
    assert page.locator("#inside output").inner_text() == "step 50"
    page.locator("#inside").scroll_into_view_if_needed()
    page.locator("#inside .uplot").nth(3).wait_for()
    assert page.locator("#inside .uplot").count() == 4


def test_seeds_are_thin_lines_under_their_mean(opened):
    page = opened("all")
    assert pixels(page, "--arm-0") > 300 and pixels(page, "--arm-1") > 100
    assert pixels(page, "--arm-1", alpha=0x2B / 255) > 300, "the band of the interval"
    label = page.locator("#entropy .uplot").get_attribute("aria-label")
    assert len(re.findall(r"seed \d ends", label)) == 6 and len(re.findall("mean ends", label)) == 2
    read = page.locator("#entropy .readout").inner_text()
    assert "seed" not in read and len(re.findall(r"mean [\d.]+ \([\d.]+ to [\d.]+\)", read)) == 2
    assert "\u00b1" in page.locator("#results table").inner_text()
    assert "</script>" in page.locator(".finding.failed").inner_text()
