"""Tool calls in a model's turn: found, read, and checked against the tools there are.

No text of a model raises an error here: a malformed call becomes a ToolCall whose `error` says to
the model what is wrong and what is expected.

hermes        <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>      Hermes, Qwen2.5,
              Qwen3
qwen3_coder   <tool_call><function=f><parameter=x>1</parameter></function></tool_call>
code          ```python ... ``` at the start of a line, or <code>...</code>      ReTool (arXiv
              2504.11536)

In hermes and qwen3_coder calls before the first `</think>`, or after a `<think>` that is not
closed, are thoughts and are not made. In code, reasoning and code alternate.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# A tool as chat templates take it: {"type": "function", "function": {"name", "description",
# "parameters"}}, the last a JSON schema.
Tool = Mapping[str, Any]
CODE_TOOL = "python"

_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>(.*?)(</function>\s*|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>(.*?)</parameter>\s*", re.DOTALL)
_CODE = re.compile(
    r"<code>(?P<tagged>.*?)(?P<tag_end></code>|\Z)"
    r"|^[ \t]*```(?:python|py)[ \t]*\n(?P<fenced>.*?)(?P<fence_end>^[ \t]*```[ \t]*$|\Z)",
    re.DOTALL | re.MULTILINE,
)
_FENCE_IN_TAG = re.compile(r"```(?:python|py)?[ \t]*\n")
# The limits of a call's JSON: within them any code can convert, print and compare it safely.
MOST_DEPTH, MOST_DIGITS = 64, 1000
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_HERMES_FORM = 'write <tool_call>{"name": "...", "arguments": {...}}</tool_call>'
_XML_FORM = (
    "write <tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n"
    "</tool_call>, one <parameter> per argument"
)


@dataclass(frozen=True)
class ToolCall:
    """One call of a model. If `error` is not empty, the call is not made, and the model gets the
    error.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class ToolFormat:
    """A format of calls. `read` gives the calls in a text, in order; it needs the tools for the
    types of arguments. `call` finds the text of each, whole or broken.

    `stop_strings` end a call: a loop that lets a model make one call at a time stops generating
    there; one that allows several in a turn waits for the end of the turn instead.
    """

    stop_strings: tuple[str, ...]
    read: Callable[[str, Sequence[Tool]], list[ToolCall]]
    call: re.Pattern[str]


def read_hermes(text: str, tools: Sequence[Tool] = ()) -> list[ToolCall]:
    """Calls as JSON objects. A missing end tag is forgiven where the object is whole:
    some engines cut stop strings.
    """
    return [_hermes_call(match[1], bool(match[2])) for match in _CALL.finditer(_spoken(text))]


def read_qwen3_coder(text: str, tools: Sequence[Tool] = ()) -> list[ToolCall]:
    """Calls as XML. Values are strings, except for parameters whose schema says otherwise:
    those are JSON.
    """
    return [_xml_call(match[1], tools) for match in _CALL.finditer(_spoken(text))]


def read_code(text: str, tools: Sequence[Tool] = ()) -> list[ToolCall]:
    """Each piece of Python is a call of the tool `python` with the argument `code`."""
    return list(_code_calls(text))


FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat(("</tool_call>",), read_hermes, _CALL),
    "qwen3_coder": ToolFormat(("</tool_call>",), read_qwen3_coder, _CALL),
    "code": ToolFormat(("</code>", "\n```\n"), read_code, _CODE),
}


def check_call(call: ToolCall, tools: Sequence[Tool]) -> ToolCall:
    """The call, with an `error` where no such tool is there or its
    arguments do not fit the tool's JSON schema.

    Of the schema: required, the names of properties, and their type and enum. The rest is the
    tool's own to judge.
    """
    if call.error:
        return call
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
    if call.name not in schemas:
        close = difflib.get_close_matches(call.name, schemas, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return _wrong(
            f"there is no tool {_short(call.name)!r}{hint} (tools: {', '.join(schemas) or 'none'})",
            call.name,
        )
    schema = schemas[call.name]
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in call.arguments:
            return _wrong(f"{call.name}: the argument {name!r} is missing", call.name)
    for name, value in call.arguments.items():
        if name not in properties:
            known = ", ".join(properties) or "none"
            return _wrong(
                f"{call.name}: there is no argument {_short(name)!r} (arguments: {known})",
                call.name,
            )
        wanted = properties[name].get("type")
        if wanted is not None and not _fits(value, wanted):
            return _wrong(
                f"{call.name}: {name} must be {_types(wanted)}, not {_short(json.dumps(value))}",
                call.name,
            )
        if "enum" in properties[name] and value not in properties[name]["enum"]:
            return _wrong(
                f"{call.name}: {name} must be one of {json.dumps(properties[name]['enum'])}",
                call.name,
            )
    return call


def _spoken(text: str) -> str:
    """The text after the reasoning; nothing while the reasoning continues."""
    _, ended, after = text.partition("</think>")
    return (after if ended else text).partition("<think>")[0]


def _hermes_call(body: str, closed: bool) -> ToolCall:
    try:
        call = strict_json(body)
    except ValueError as error:
        unclosed = "" if closed else "there is no </tool_call>, and "
        return _wrong(
            f"{unclosed}what follows <tool_call> is not a JSON object ({error}); {_HERMES_FORM}"
        )
    if not isinstance(call, dict):
        return _wrong(
            f"a tool call must be a JSON object, not {_short(body.strip())}; {_HERMES_FORM}"
        )
    name = call.get("name")
    if not isinstance(name, str) or not name:
        return _wrong(
            f'"name" must be the name of a tool, not {_short(json.dumps(name))}; {_HERMES_FORM}'
        )
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):  # some models write the arguments as JSON inside a string
        try:
            arguments = strict_json(arguments)
        except ValueError as error:
            return _wrong(
                f'{name}: "arguments" is a string that holds no JSON ({error}); {_HERMES_FORM}',
                name,
            )
    if not isinstance(arguments, dict):
        return _wrong(
            f'{name}: "arguments" must be a JSON object, not {_short(json.dumps(arguments))}', name
        )
    return ToolCall(name, arguments)


def _xml_call(body: str, tools: Sequence[Tool]) -> ToolCall:
    function = _FUNCTION.match(body)
    if function is None or not function[1].strip():
        return _wrong(f"there is no <function=NAME> after <tool_call>; {_XML_FORM}")
    name = function[1].strip()
    if not function[3]:
        return _wrong(f"{name}: there is no </function>; {_XML_FORM}", name)
    if body[function.end() :].strip():
        return _wrong(
            f"{name}: unexpected {_short(body[function.end() :].strip())!r} after </function>", name
        )
    types = _types_of(name, tools)
    arguments: dict[str, Any] = {}
    position, inside = 0, function[2].rstrip()
    while position < len(inside):
        parameter = _PARAMETER.match(inside, position)
        if parameter is None:
            return _wrong(
                f"{name}: {_short(inside[position:].strip())!r} is not a <parameter>; {_XML_FORM}",
                name,
            )
        key, value = parameter[1].strip(), parameter[2].removeprefix("\n").removesuffix("\n")
        wanted = types.get(key, "string")
        try:
            arguments[key] = value if _fits("", wanted) else strict_json(value)
        except ValueError:
            return _wrong(
                f"{name}: {key} must be {_types(wanted)} in JSON, not {_short(value)!r}", name
            )
        position = parameter.end()
    return ToolCall(name, arguments)


def _types_of(name: str, tools: Sequence[Tool]) -> dict[str, str | Sequence[str]]:
    """The types of a tool's arguments that its schema names. An agent may send any schema."""
    found = [
        tool["function"].get("parameters") for tool in tools if tool["function"]["name"] == name
    ]
    properties = found[-1].get("properties") if found and isinstance(found[-1], dict) else None
    named = properties.items() if isinstance(properties, dict) else ()
    return {key: its["type"] for key, its in named if isinstance(its, dict) and its.get("type")}


def _code_calls(text: str) -> Iterator[ToolCall]:
    for match in _CODE.finditer(text):
        tagged = match["tagged"] is not None
        code = match["tagged"] if tagged else match["fenced"]
        if tagged:
            code = _without_fence(code)
            if not match["tag_end"]:
                yield _wrong("the code is not closed: there is no </code>", CODE_TOOL)
                continue
        elif not match["fence_end"]:
            yield _wrong("the code is not closed: a line with ``` must follow it", CODE_TOOL)
            continue
        if not code.strip():
            yield _wrong("there is no code between the marks", CODE_TOOL)
        else:
            yield ToolCall(CODE_TOOL, {"code": code.removesuffix("\n")})


def _without_fence(code: str) -> str:
    """The text between ``` fences within a tag; all of it where there are none."""
    whole = code.strip()
    opened = _FENCE_IN_TAG.match(whole)
    if opened is None or not whole.endswith("```") or len(whole) < opened.end() + 3:
        return code.strip("\n")
    return whole[opened.end() : -3].rstrip(" \t").removesuffix("\n")


def strict_json(text: str) -> Any:
    """The value; ValueError, in few words, for anything that is not strict JSON, nests too deep, or
    holds what is no text, a number without end, or one beyond all floats.
    """

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a JSON value")

    def integer(digits: str) -> int:
        if len(digits) > MOST_DIGITS:
            raise ValueError(f"a number of {len(digits)} digits is too long")
        return int(digits)

    def fraction(digits: str) -> float:
        if math.isinf(value := float(digits)):
            raise ValueError(f"{_short(digits)} is too large a number")
        return value

    try:
        value = json.loads(
            text, parse_constant=refuse, parse_int=integer, parse_float=fraction, strict=False
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos}") from None
    except RecursionError:
        raise ValueError("nested too deep") from None
    _refuse_strange(value)
    return value


def _refuse_strange(value: Any) -> None:
    """ValueError where a value nests too deep or holds a half of a surrogate pair, which JSON can
    spell (\\ud800) but no text holds, and no tokenizer takes.
    """
    level = [value]
    for _ in range(MOST_DEPTH):
        for item in level:
            if isinstance(item, str) and not item.isascii():
                try:
                    item.encode()
                except UnicodeEncodeError as error:
                    half = f"\\u{ord(item[error.start]):04x}"
                    raise ValueError(f"a text holds {half}, half of a surrogate pair") from None
        inner = [item for item in level if isinstance(item, dict | list)]
        level = [value for item in inner for value in item]
        level += [value for item in inner if isinstance(item, dict) for value in item.values()]
        if not level:
            return
    raise ValueError("nested too deep")


def _fits(value: Any, wanted: str | Sequence[str]) -> bool:
    names = [wanted] if isinstance(wanted, str) else wanted
    if isinstance(value, bool):
        return "boolean" in names
    if isinstance(value, float) and value.is_integer() and "integer" in names:
        return True
    return any(isinstance(value, _JSON_TYPES.get(name, (object,))) for name in names)


def _types(wanted: str | Sequence[str]) -> str:
    return wanted if isinstance(wanted, str) else " or ".join(wanted)


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:80]}..."


def _wrong(message: str, name: str = "") -> ToolCall:
    return ToolCall(name, error=f"Error: {message}")
