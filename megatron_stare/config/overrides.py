"""Typed dotted overrides of the command line, and a Config's way to a file and back."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from megatron_stare import __version__
from megatron_stare.config.errors import UserError
from megatron_stare.config.limits import check, lookup
from megatron_stare.config.moved import MOVED, renamed
from megatron_stare.config.stages import Config

_FREE_FORM = (
    "evaluation.eval_data",
    "compare.arms",
    "scoring.rewards",
    "scoring.advantage_settings",
    "loss.settings",
)
SECRETS = ("sglang.api_key",)  # in no file and no message
_NAMED_SETTINGS = "evaluation.per_set"  # below it a free name, then fields


def override(config: Config, overrides: Iterable[str]) -> Config:
    """The config with `section.field=value` strings applied, types and ranges checked.

    Raises UserError naming the nearest key for an unknown one, and the field, value and type for an
    ill-typed one.
    """
    tree = _writable(config)
    items = [_item(config, item) for item in overrides]
    try:
        return _checked(_merged(tree, items))
    except (OmegaConfBaseException, YAMLError):
        for item in items:  # one at a time is slow, and names what is wrong
            try:
                tree = _merged(tree, [item])
            except (OmegaConfBaseException, YAMLError) as error:
                key = item.partition("=")[0]
                raise UserError(
                    f"override {item!r}: {_first_line(error)}; the default is "
                    f"{lookup(config, key)!r}"
                ) from None
        return _checked(tree)


def check_arms(config: Config, overrides: Iterable[str]) -> None:
    """UserError: an override changes nothing in an arm that will be trained, for the arm sets the
    same key. Who gives the arm beside it wants it so.
    """
    settings, given = config.compare, list(overrides)
    changed = {item.partition("=")[0].removeprefix("compare.arms.") for item in given}
    for arm in (arm for arm in settings.run or settings.arms if arm not in changed):
        own = dict(item.split("=", 1) for item in settings.arms.get(arm, ()))
        for item in given:
            key, _, value = item.partition("=")
            if own.get(key, value) != value:
                items = ",".join(f"{name}={each}" for name, each in (own | {key: value}).items())
                raise UserError(
                    f"override {item!r} changes nothing in arm {arm!r}, which sets "
                    f"{key}={own[key]}; change the arm: 'compare.arms.{arm}=[{items}]'"
                )


def _item(config: Config, item: str) -> str:
    """`key=value` as OmegaConf reads it. UserError: no such key, or no value."""
    key, separator, value = item.partition("=")
    if not separator:
        raise UserError(
            f"override {item!r} has no '='; write section.field=value, e.g. optimizer.lr=1e-6"
        )
    if key in MOVED:
        raise UserError(f"{key} is now {MOVED[key]}; write {MOVED[key]}={value}")
    _require_known(key)
    if value == "???":
        raise UserError(
            f"override {item!r}: ??? means missing; the default is {lookup(config, key)!r}"
        )
    return item if value else f"{item}''"  # an empty text, which YAML would read as null


def _merged(tree: Any, items: list[str]) -> Any:
    tree = OmegaConf.merge(tree, OmegaConf.from_dotlist(items))
    OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    return tree


def load(path: Path) -> Config:
    """A Config from a run's config.yaml; keys of an earlier version are read as today's."""
    try:
        settings, _ = _read(path)
        tree = OmegaConf.merge(_writable(Config()), settings)
        OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except (OmegaConfBaseException, YAMLError, OSError, UnicodeDecodeError, TypeError) as error:
        raise UserError(
            f"{path}: {_first_line(error)}; it must be a config.yaml written by a run of this "
            f"version ({__version__}) or an earlier one"
        ) from None
    return _checked(tree)


def moved_keys(path: Path) -> list[str]:
    """One line for every key of a config.yaml that has another name today; none if unreadable."""
    try:
        return _read(path)[1]
    except (OmegaConfBaseException, YAMLError, OSError, UnicodeDecodeError, TypeError):
        return []  # `load` says what is wrong with it


def _read(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The settings of a config.yaml under today's names, and what was renamed."""
    settings = OmegaConf.to_container(OmegaConf.load(path))
    if not isinstance(settings, dict):
        raise TypeError("it holds no settings by name")
    return renamed({str(section): fields for section, fields in settings.items()})


def dump(config: Config, path: Path) -> None:
    """Write the config as YAML, readable by `load` and by `train`; without what is secret."""
    settings: Any = dataclasses.asdict(config)
    for key in SECRETS:
        section, _, name = key.partition(".")
        settings[section][name] = ""
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(settings)))


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


def _writable(config: Config) -> DictConfig:
    """OmegaConf's tree of typed nodes."""
    if config == Config():
        return copy.deepcopy(_defaults())  # several times quicker than making one
    tree = OmegaConf.structured(config)
    OmegaConf.set_readonly(tree, False)
    return tree


@functools.cache
def _defaults() -> DictConfig:
    tree = OmegaConf.structured(Config())
    OmegaConf.set_readonly(tree, False)
    return tree


def _checked(tree: Any) -> Config:
    config = OmegaConf.to_object(tree)
    assert isinstance(config, Config)
    check(config)
    return config


def _require_known(key: str) -> None:
    """Raise for a dotted key that names no field; keys inside a free-form dict field are free."""
    valid = _known()
    section, _, name = key.rpartition(".")
    if (
        key in valid
        or (section in _FREE_FORM and name)
        or section.rpartition(".")[0] == _NAMED_SETTINGS
    ):
        return
    same_field = [name for name in valid if name.split(".")[-1] == key.split(".")[-1]]
    close = same_field or difflib.get_close_matches(key, valid, n=1, cutoff=0.0)
    section = close[0].split(".")[0]
    fields = ", ".join(name.split(".", 1)[1] for name in valid if name.startswith(f"{section}."))
    raise UserError(f"unknown key {key!r}; did you mean {close[0]!r}? ({section} has: {fields})")


@functools.cache
def _known() -> dict[str, Any]:
    """Every dotted field and its default."""
    return _flatten(dataclasses.asdict(Config()), keep_empty=True)


def _flatten(tree: Any, prefix: str = "", keep_empty: bool = False) -> dict[str, Any]:
    if not isinstance(tree, dict) or (keep_empty and not tree):
        return {prefix.rstrip("."): tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(_flatten(value, f"{prefix}{key}.", keep_empty))
    return flat


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
