"""Rollouts in a real browser: walked, filtered, compared; hostile texts stay texts.

Needs Chromium (CHROMIUM, or on the PATH) and playwright's Python package: make browser.
"""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.browser


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
    tops = set(answers.evaluate_all("all => all.map(e => e.offsetTop)"))
    assert len(tops) == 1, "side by side"
    second = answers.nth(1).get_by_role("button").inner_text()
    answers.nth(1).get_by_role("button").click()
    assert answers.count() == 0 and page.evaluate("document.activeElement.id") == "group"
    assert second.split(":")[0] in page.locator(".hits [aria-current]").inner_text()


def test_hostile_texts_are_shown_as_texts(opened):
    page = opened("hostile")
    assert page.locator("main script").count() == 0 and page.locator("script").count() == 2
    shown = page.locator(".tokens").inner_text()
    assert "</script><script>alert(1)</script>" in shown and "&lt;b&gt;" in shown
    assert "[U+202E]reversed[U+2066]" in shown and "[U+0000][U+0007][U+001B]" in shown
    assert "\u202e" not in shown and "\ufffd alone, \ufffd too" in shown


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
