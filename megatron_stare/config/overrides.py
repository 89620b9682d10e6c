"""A Config from overrides of the command line, and its way to a YAML file and back."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import typing
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from megatron_stare.config.aliases import unknown
from megatron_stare.config.errors import UserError
from megatron_stare.config.rules import SECRETS, check, unread
from megatron_stare.config.run import Config, kind_of_values, lookup, settings
from megatron_stare.config.section import Setting, fields_of, setting_of

# The beginning of a text that an override writes as YAML; any other text stands for itself.
_QUOTED = re.compile(r"[\"'\[{]|(?:null|~)$")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|[0-9][0-9_]*[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)"
)


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-6 is a number and a date is text, and no key is given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value]
        for key, _ in node.value:
            if keys.count(key.value) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key.value!r} is given twice", key.start_mark
                )
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what _Loader would read as a number."""


for each in (_Loader, _Dumper):
    each.yaml_implicit_resolvers = {
        first: [pair for pair in pairs if not pair[0].endswith((":float", ":timestamp"))]
        for first, pairs in each.yaml_implicit_resolvers.items()
    }
    each.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(f"(?:{_FLOAT.pattern})$"), list("-+0123456789.")
    )


def override(config: Config, overrides: Iterable[str]) -> Config:
    """The config with `section.field=value` strings applied, types and ranges checked. Settings of
    `config` that nothing reads any more return to their defaults: without its tools, a recipe has
    no tools.max_turns.

    Raises UserError naming the nearest key for an unknown one, field, value and remedy for a value
    that the field cannot have, and the override that nothing reads.
    """
    tree, given = dataclasses.asdict(config), set()
    for key, value in map(_parsed, overrides):
        node, name = _node(tree, key)
        node[name] = _merged(node.get(name), value)
        given.add(key)
    idle = {key for keys in unread(_validated(tree)).values() for key in keys}
    for key in idle - given:
        node, name = _node(tree, key)
        node[name] = settings()[key].default
    return from_tree(tree)


def from_tree(tree: dict[str, Any]) -> Config:
    """A Config from nested sections, e.g. {"loss": {"name": "grpo"}}; UserError as in override."""
    config = _validated(tree)
    check(config)
    return config


def _node(tree: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """The mapping in which a dotted key has its value, and the key's last part."""
    *sections, name = key.split(".")
    for part in sections:
        tree = tree.setdefault(part, {})
    return tree, name


_READER = TypeAdapter(Config)


def _validated(tree: dict[str, Any]) -> Config:
    try:
        return _READER.validate_python(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = [str(part) for part in first["loc"]]
        if first["type"] == "unexpected_keyword_argument":
            raise unknown(place) from None
        raise UserError(_refusal(place, first["input"])) from None


def check_arms(config: Config, overrides: Iterable[str]) -> None:
    """UserError: a comparison's settings without arms; or an override changes nothing in an arm
    that will be trained, for the arm sets the same key. If the command also overrides that arm,
    this is intended and allowed.
    """
    compared, given = config.compare, list(overrides)
    for key, value in vars(compared).items():
        if value and not compared.arms:
            raise UserError(
                f"compare.{key}={value} has no effect without compare.arms; leave it out, or train "
                "several objectives with `compare SOURCE --losses NAMES`"
            )
    changed = {item.partition("=")[0].removeprefix("compare.arms.") for item in given}
    for arm in (arm for arm in compared.run or compared.arms if arm not in changed):
        own = dict(item.partition("=")[::2] for item in compared.arms.get(arm, ()))
        for item in given:
            key, _, value = item.partition("=")
            if own.get(key, value) != value:
                items = ",".join(f"{name}={each}" for name, each in (own | {key: value}).items())
                raise UserError(
                    f"override {item!r} changes nothing in arm {arm!r}, which sets "
                    f"{key}={own[key]}; change the arm: 'compare.arms.{arm}=[{items}]'"
                )


def load(path: Path) -> Config:
    """A Config from a YAML file: a run's config.yaml, or sections written by hand."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = yaml.load(text, _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}{_problem(error)}; correct the YAML there") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} holds no sections; write for example `optimizer: {{lr: 1e-6}}`")
    _refuse_interpolation(text, f"{path} contains")
    try:
        return from_tree(tree)
    except UserError as error:
        raise UserError(f"{path}{_line_of(text, str(error))}: {error}") from None


def dump(config: Config, path: Path) -> None:
    """Write the config as YAML, readable by `load` and by `train`; without what is secret."""
    tree: Any = dataclasses.asdict(config)
    for key in SECRETS:
        section, _, name = key.partition(".")
        tree[section][name] = ""
    text = yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    path.write_text(text, encoding="utf-8")


def without_secrets(arguments: Iterable[str]) -> list[str]:
    """A command's arguments as they may be shown."""
    return [
        f"{key}=***" if (key := argument.partition("=")[0]) in SECRETS else argument
        for argument in arguments
    ]


def differences(one: Config, other: Config) -> Iterator[tuple[str, Any, Any]]:
    """Every dotted field on which two configs differ, with both values; secrets are left out."""
    first, second = (_flatten(dataclasses.asdict(config)) for config in (one, other))
    for key in sorted(first.keys() | second.keys()):
        if key not in SECRETS and first.get(key) != second.get(key):
            yield key, first.get(key), second.get(key)


def _parsed(item: str) -> tuple[str, Any]:
    """Key and value of `key=value`. UserError: no such key, no value, or no YAML."""
    key, separator, text = item.partition("=")
    if not separator:
        raise UserError(
            f"override {item!r} has no '='; write section.field=value, e.g. optimizer.lr=1e-6"
        )
    if not _is_known(key):
        raise unknown(key.split("."))
    default, secret = lookup(Config(), key), key in SECRETS
    shown, own = (f"{key}=***", "***") if secret else (item, text)
    if text == "???":
        raise UserError(f"override {item!r}: ??? is not a value; the default is {default!r}")
    _refuse_interpolation(text, f"override {shown!r} contains")
    kind = settings()[key].kind if key in settings() else kind_of_values(key.rpartition(".")[0])
    if kind is str and not _QUOTED.match(text):
        return key, text  # a directory named 007, a message with "####" or ": "
    remedy = f"the default is {default!r}"
    if kind is str:
        quoted = f"{key}={json.dumps(own, ensure_ascii=False)}"
        remedy = f"for this text itself write {shlex.quote(quoted)}"
    try:
        value = yaml.load(text, _Loader) if text else ""
    except yaml.YAMLError as error:
        problem = "" if secret else _problem(error)  # it may quote the text
        raise UserError(f"override {shown!r} is not YAML{problem}; {remedy}") from None
    if kind is str and isinstance(value, list | dict):
        raise UserError(f"override {shown!r} is a {type(value).__name__}, no text; {remedy}")
    return key, value


def _is_known(key: str) -> bool:
    """Whether an override may set the key: a field, a name in a field of free names, or a field of
    such a name, as in evaluation.per_set.NAME.n_samples.
    """
    holder, _, name = key.rpartition(".")
    free = kind_of_values(holder) or is_dataclass(kind_of_values(holder.rpartition(".")[0]))
    return key in settings() or bool(name and free)


def _merged(old: Any, new: Any) -> Any:
    """`new`; of two mappings, the names of both."""
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {name: _merged(old.get(name), value) for name, value in new.items()}
    return new


def _refusal(place: list[str], value: Any) -> str:
    """The message for a value at a place in the tree: a section, a setting or a part of one."""
    keys = [".".join(place[:end]) for end in range(len(place), 0, -1)]
    key = next((key for key in keys if key in settings()), None)
    if key is None:
        return f"{keys[0]}={value!r} is not a section; give its fields by name"
    setting, rest = settings()[key], place[key.count(".") + 1 :]
    value = "***" if key in SECRETS else value
    if not rest:
        return setting.refusal(value)
    kind = typing.get_args(setting.kind)[-1]
    if is_dataclass(kind):
        if not rest[1:]:
            return f"{keys[0]}={value!r} is not a section; give its fields by name"
        return setting_of(keys[0], fields_of(kind)[rest[1]]).refusal(value)
    element = Setting(f"{key}.{rest[0]}", kind)
    if element.choices:
        return f"{key} has {value!r}, which is none of {', '.join(element.choices)}"
    return element.refusal(value)


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix.rstrip("."): tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(_flatten(value, f"{prefix}{key}."))
    return flat


def _refuse_interpolation(text: str, where: str) -> None:
    if "${" in text:
        raise UserError(f"{where} '${{', which nothing replaces here; write the value itself")


def _line_of(text: str, message: str) -> str:
    """`, line N` of the key in a YAML file that a message begins with; empty if it has none."""
    named = re.match(r"(?:unknown key ')?([\w.]+)", message)
    node, line = yaml.compose(text, _Loader), 0
    for part in named[1].split(".") if named else ():
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        found = next((pair for pair in pairs if pair[0].value == part), None)
        if found is None:
            break
        line, node = found[0].start_mark.line + 1, found[1]
    return f", line {line}" if line else ""


def _problem(error: yaml.YAMLError) -> str:
    """Line and fault of a YAML error, as the end of a sentence."""
    mark, fault = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    line = f", line {mark.line + 1}" if mark else ""
    return f"{line}: {fault or str(error).strip().splitlines()[0]}"
