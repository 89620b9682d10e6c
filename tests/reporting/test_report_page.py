"""One file, nothing fetched, and no text of a model's that is more than text."""

from __future__ import annotations

import hashlib
import html.parser
import json
import re
from importlib.resources import files

import pytest

from benchmarks._synthetic_run import write_run
from megatron_stare.reporting import report
from megatron_stare.reporting.page.content import content_of
from megatron_stare.reporting.report import as_json, printable, render

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "]]>",
    "\x00\x07\x1b[31m",
    "\ud800 alone, \udfff too",
    "\u202ereversed\u2066",
    "\u2028\u2029",
    "&lt;b&gt;",
    "${title} $data {x}",
    "\U0001f469\u200d\U0001f4bb \u05e9\u05dc\u05d5\u05dd",
)


class Elements(html.parser.HTMLParser):
    """Every start tag, and what stands inside script elements."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self.tags: list[tuple[str, dict]] = []
        self.scripts: list[str] = []
        self._inside = False

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self._inside, self.scripts = True, [*self.scripts, ""]

    def handle_endtag(self, tag):
        self._inside = self._inside and tag != "script"

    def handle_data(self, data):
        if self._inside:
            self.scripts[-1] += data


def parsed(page: str) -> Elements:
    elements = Elements()
    elements.feed(page)
    return elements


def test_hostile_texts_are_data_and_come_back_whole(tmp_path):
    write_run(tmp_path, 4, every=2, tokens=40, texts=HOSTILE)
    page = render(content_of([tmp_path]) | {"title": HOSTILE[0], "caveats": list(HOSTILE)})
    page.encode("utf-8")
    found = parsed(page)
    assert [tag for tag, _ in found.tags].count("script") == 2 == len(found.scripts)
    tree = json.loads(found.scripts[0])
    assert tree["caveats"] == list(HOSTILE)
    assert set(tree["inside"][0]["rollouts"][0]["text"]) <= set(HOSTILE)
    assert found.scripts[0].isascii() and not set("<>&") & set(found.scripts[0])
    assert "<title>&lt;/script&gt;" in page


def test_a_page_fetches_nothing_from_the_network(tmp_path):
    write_run(tmp_path, 2)
    page = render(content_of([tmp_path]))
    found = parsed(page)
    assert not [
        each for _, attributes in found.tags for each in attributes if each in ("src", "srcset")
    ]
    links = [attributes["href"] for tag, attributes in found.tags if tag in ("a", "link")]
    assert links == ["data:,", "#content"]
    named = re.findall(r"url\(|@import|https?://[\w./]+", page)
    assert set(named) == {"http://www.w3.org/2000/svg", "https://github.com/leeoniya/uPlot"}
    assert page.count("https:") == 1, "the library's name of itself, in a comment"
    policy = next(each["content"] for tag, each in found.tags if each.get("http-equiv"))
    assert "default-src 'none'" in policy and "connect-src 'none'" in policy
    assert "unsafe" not in policy
    live = next(
        each["content"]
        for _, each in parsed(render(content_of([tmp_path]), live=True)).tags
        if each.get("http-equiv")
    )
    assert "connect-src 'self'" in live


def test_numbers_outside_of_json_are_refused():
    with pytest.raises(ValueError, match="JSON"):
        as_json({"a": float("nan")})
    assert printable("a\x00\ud800b\n") == "a\ufffd\ufffdb\n"


def test_the_chart_library_is_as_published_with_its_licence(tmp_path):
    folder = files("megatron_stare.reporting.page") / "assets"
    digests = {
        report.LIBRARY: "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        report.LIBRARY_STYLE: ("df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04"),
        report.LIBRARY_LICENSE: (
            "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd"
        ),
    }
    for name, digest in digests.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
    write_run(tmp_path, 2)
    page = render(content_of([tmp_path]))
    assert (folder / report.LIBRARY_LICENSE).read_text() in page
