"""Calls in every format, what malformed ones are answered with, and that no text at all raises."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stare.rollout.tools.calls import FORMATS, ToolCall, check_call

TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "limit": {"type": "integer"},
                    "exact": {"type": "boolean"},
                    "order": {"type": "string", "enum": ["new", "old"]},
                    "tags": {"type": ["array", "null"]},
                },
                "required": ["query"],
            },
        },
    },
)
FENCE = "```"


def read(name, text):
    return FORMATS[name].read(text, TOOLS)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("no call", []),
        ('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', [("f", {"x": 1})]),
        ('ok\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n', [("f", {})]),
        (
            '<tool_call>{"name": "f"}</tool_call> and <tool_call>{"name": "g"}</tool_call>',
            [("f", {}), ("g", {})],
        ),
        (
            '<tool_call>{"name": "f", "arguments": "{\\"x\\": [1]}"}</tool_call>',
            [("f", {"x": [1]})],
        ),
        ('<tool_call>{"name": "f", "arguments": {"x": "a\nb"}}', [("f", {"x": "a\nb"})]),
        (
            '<think>I may <tool_call>{"name": "f"}</tool_call></think>\n'
            '<tool_call>{"name": "g"}</tool_call>',
            [("g", {})],
        ),
        ('<think>I may <tool_call>{"name": "f"}</tool_call>', []),
        ('thought\n</think><tool_call>{"name": "g"}</tool_call>', [("g", {})]),
        ('<tool_call>{"name": "f", "arguments": {"s": "</think>"}}</tool_call>', []),
    ],
)
def test_hermes_calls_are_read(text, calls):
    assert [(call.name, call.arguments) for call in read("hermes", text)] == calls


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            '{"name": "f", "arguments": {"x": 1}',
            "not a JSON object (Expecting ',' delimiter at character 35)",
        ),
        ("{'name': 'f'}", "not a JSON object"),
        ('["f"]', "must be a JSON object"),
        ('{"arguments": {}}', '"name" must be the name of a tool, not null'),
        ('{"name": 3}', '"name" must be the name of a tool, not 3'),
        ('{"name": "f", "arguments": [1]}', '"arguments" must be a JSON object, not [1]'),
        ('{"name": "f", "arguments": "x"}', '"arguments" is a string that holds no JSON'),
        ('{"name": "f", "arguments": {"x": NaN}}', "NaN is not a JSON value"),
        ('{"name": "f", "arguments": {"x": -1e999}}', "-1e999 is too large a number"),
        ("[" * 100_000, "nested too deep"),
        ('{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}", "not a JSON object"),
        ("", "not a JSON object"),
    ],
)
def test_malformed_hermes_calls_are_explained(body, words):
    (call,) = read("hermes", f"<tool_call>{body}</tool_call>")
    assert call.error.startswith("Error: ")
    assert words in call.error
    assert len(call.error) < 400


def test_a_hermes_call_that_was_cut_off_is_explained():
    (call,) = read("hermes", '<tool_call>{"name": "f", "argum')
    assert "there is no </tool_call>" in call.error
    first, second = read("hermes", '<tool_call>{"name": <tool_call>{"name": "g"}</tool_call>')
    assert first.error
    assert second == ToolCall("g")


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        (
            "<function=search>\n<parameter=query>\nfirst\nsecond\n</parameter>\n</function>",
            {"query": "first\nsecond"},
        ),
        (
            "\n<function=search><parameter=query>1</parameter><parameter=limit>1</parameter></function>\n",
            None,
        ),
        (
            "<function=search><parameter=query>a<b && c</parameter></function>",
            {"query": "a<b && c"},
        ),
        ("<function=search></function>", {}),
        ("<function=search><parameter=exact>true</parameter></function>", {"exact": True}),
        ('<function=search><parameter=tags>["a", 1]</parameter></function>', {"tags": ["a", 1]}),
        ("<function=search><parameter=tags>null</parameter></function>", {"tags": None}),
        ("<function=other><parameter=n>1</parameter></function>", {"n": "1"}),
    ],
)
def test_qwen3_coder_calls_are_read(body, arguments):
    (call,) = read("qwen3_coder", f"<tool_call>{body}</tool_call>")
    assert not call.error
    assert call.arguments == ({"query": "1", "limit": 1} if arguments is None else arguments)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"name": "search"}', "no <function=NAME>"),
        ("<function=>x</function>", "no <function=NAME>"),
        ("<function=search><parameter=query>x</parameter>", "there is no </function>"),
        ("<function=search>words</function>", "'words' is not a <parameter>"),
        ("<function=search><parameter=query>x</function>", "is not a <parameter>"),
        (
            "<function=search><parameter=limit>many</parameter></function>",
            "limit must be integer in JSON, not 'many'",
        ),
        ("<function=search></function> more", "unexpected 'more'"),
    ],
)
def test_malformed_qwen3_coder_calls_are_explained(body, words):
    (call,) = read("qwen3_coder", f"<tool_call>{body}</tool_call>")
    assert words in call.error


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        (f"Let me see.\n{FENCE}python\nprint(1)\n{FENCE}\n", ["print(1)"]),
        (
            f"{FENCE}py\na = 1\n\nb = 2\n{FENCE}\nand\n{FENCE}python\nc\n{FENCE}",
            ["a = 1\n\nb = 2", "c"],
        ),
        ("<code>x = 1\nx</code>", ["x = 1\nx"]),
        (f"<code>\n{FENCE}python\nx = 1\n{FENCE}\n</code>", ["x = 1"]),
        (f"{FENCE}json\n1\n{FENCE}\n{FENCE}\n2\n{FENCE}", []),
        (f"in a line {FENCE}python\nx\n{FENCE}", []),
        (f"{FENCE}python\nx = '''{FENCE}'''\n{FENCE}\n", [f"x = '''{FENCE}'''"]),
        ("nothing", []),
    ],
)
def test_code_fences_are_read(text, codes):
    calls = read("code", text)
    assert calls == [ToolCall("python", {"code": code}) for code in codes]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<code>x", "no </code>"),
        (f"{FENCE}python\nx", "a line with ``` must follow"),
        (f"{FENCE}python\n\n{FENCE}", "no code"),
        ("<code> </code>", "no code"),
    ],
)
def test_malformed_code_is_explained(text, words):
    (call,) = read("code", text)
    assert words in call.error


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("serch", {}, "there is no tool 'serch'; did you mean 'search'? (tools: search)"),
        ("search", {}, "the argument 'query' is missing"),
        ("search", {"query": 1}, "query must be string, not 1"),
        ("search", {"query": "a", "limit": True}, "limit must be integer, not true"),
        ("search", {"query": "a", "limit": 1.5}, "limit must be integer, not 1.5"),
        ("search", {"query": "a", "tags": "x"}, 'tags must be array or null, not "x"'),
        ("search", {"query": "a", "order": "random"}, 'order must be one of ["new", "old"]'),
        ("search", {"query": "a", "colour": 1}, "there is no argument 'colour'"),
        ("search", {"query": "a", "limit": 2.0, "tags": None, "order": "new", "exact": False}, ""),
    ],
)
def test_calls_are_checked_against_the_schema(name, arguments, words):
    checked = check_call(ToolCall(name, arguments), TOOLS)
    assert words in checked.error
    assert bool(words) == bool(checked.error)


def test_an_earlier_error_is_kept():
    assert check_call(ToolCall("", error="Error: x"), TOOLS).error == "Error: x"


MARKS = (
    "<tool_call> </tool_call> <function= f> </function> <parameter= query> </parameter> <code> "
    "</code> ``` ```python"
)
OTHERS = (
    '<think> </think> { } [ ] " "name" : , "f" "arguments" 1 - NaN \\ \\u search limit> query true'
)
PIECES = st.sampled_from([*MARKS.split(), *OTHERS.split(), "\n", "\x00", "\ud800", " "])


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(), st.lists(PIECES, max_size=60).map("".join)))
def test_random_text_never_raises(text):
    for form in FORMATS.values():
        for call in form.read(text, TOOLS):
            checked = check_call(call, TOOLS)
            assert checked.error or checked.name
            assert isinstance(checked.arguments, dict)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    st.lists,
)
ARGUMENTS = st.dictionaries(st.text(), JSON, max_size=4)


@settings(max_examples=100, deadline=None)
@given(st.text(min_size=1), ARGUMENTS)
def test_written_hermes_calls_are_read_back(name, arguments):
    text = f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    if (
        not any(mark in text for mark in ("think>", "<tool_call>\n<tool_call>"))
        and text.count("tool_call>") == 2
    ):
        assert read("hermes", text) == [ToolCall(name, arguments)]


@settings(max_examples=100, deadline=None)
@given(
    st.text().filter(lambda code: "<code>" not in code and "</code>" not in code and code.strip())
)
def test_written_code_is_read_back(code):
    (call,) = read("code", f"words <code>\n{code}\n</code> words")
    if "```" not in code:
        assert call.arguments["code"].strip("\n") == code.strip("\n")
