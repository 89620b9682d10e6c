"""The commands that know recipes and settings: `recipes`, `config` and `completion`.

`config SOURCE [overrides]`: every setting with its value, the origin of the value, and its
sentence; the JSON Schema of a run's YAML is made of the same settings.
A line is an override that can be used as it is, followed by a comment:

    optimizer.lr=0.001  # recipe, default 1e-06. Peak learning rate, reached after warm-up.

`completion SHELL`: everything the script knows is written into it, so that a press of Tab starts no
Python.

    source <(python -m megatron_stare completion bash)      # bash, zsh
    python -m megatron_stare completion fish | source
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from megatron_stare.commands.arguments import (
    OPTIONAL_SOURCE,
    OVERRIDES,
    argument,
    command,
    command_parsers,
)
from megatron_stare.config import Config, UserError, lookup, nearest, override
from megatron_stare.config.rules import SECRETS
from megatron_stare.config.run import settings
from megatron_stare.config.section import Setting
from megatron_stare.recipes import RECIPES, cluster_of, config_of

_VALUE_COLUMN = 48
# Plain text that YAML reads as it is: without YAML's own signs, and no number.
_PLAIN = re.compile(r"(?=\D)[\w./-][\w./ -]*|")
_RESERVED = re.compile(r"(?i)y|n|yes|no|on|off|true|false|null")
SHELLS = ("bash", "zsh", "fish")
PROGRAM = "megatron-stare"


@command("recipes", "list every recipe with its GPUs and its purpose", examples=("recipes",))
def _recipes(options: argparse.Namespace) -> int:
    """One line a recipe: name, GPUs that train + of servers, the first sentence of what it says."""
    widest = max(map(len, RECIPES))
    for name, recipe in RECIPES.items():
        cluster = cluster_of(name)
        gpus = f"{cluster.trainer_gpus} + {cluster.rollout_gpus} GPUs" if cluster else "no GPU"
        original = recipe.args[0] if isinstance(recipe, functools.partial) else recipe
        said = " ".join((inspect.getdoc(original) or "").split()).partition(". ")[0].rstrip(".")
        if original is not recipe:
            said = f"{original.__name__} with GRPO-ds"
        print(f"{name:{widest}}  {gpus:16}{said}")
    return 0


@command(
    "config",
    "print every setting of a run with its value, the origin of the value and its meaning",
    OPTIONAL_SOURCE,
    OVERRIDES,
    argument("--only", default="", help="a section, or the beginning of a key, e.g. loss"),
    argument("--schema", metavar="FILE", type=Path, help="write a JSON Schema of a run's YAML"),
    examples=("config quickstart", "config quickstart --only loss"),
)
def _settings(options: argparse.Namespace) -> int:
    if options.schema:
        try:
            options.schema.write_text(schema(), encoding="utf-8")
        except OSError as error:
            raise UserError(f"{options.schema}: {error.strerror}; choose another place") from None
        print(f"written: {options.schema}")
        return 0
    if not options.source:
        raise UserError("config needs a recipe, a YAML file or a run directory")
    if not any(key.startswith(options.only) for key in settings()):
        places = {*settings(), *(key.partition(".")[0] for key in settings())}
        listing = "config SOURCE"
        raise UserError(
            f"--only {options.only}: no setting{nearest(options.only, places, listing)}"
        )
    base = config_of(options.source, [])
    source = "recipe" if options.source in RECIPES else "config.yaml"
    print(text(base, override(base, options.overrides), source, options.only))
    return 0


def text(base: Config, config: Config, source: str, only: str = "") -> str:
    """A line for every setting of `config`.

    `base` is the recipe's or file's own Config, before overrides; `source` says which of both it
    is. `only`: a section, or the beginning of a dotted key.
    """
    lines = []
    for key, setting in settings().items():
        if key.startswith(only):
            origin = origin_of(setting, lookup(base, key), lookup(config, key), source)
            line = f"{assignment(key, lookup(config, key)):{_VALUE_COLUMN}}  # {origin}."
            lines.append(f"{line} {setting.description}")
    return "\n".join(lines)


def origin_of(setting: Setting, base: Any, value: Any, source: str) -> str:
    """`default`, `override` or `source`, the latter two with the default that they replace."""
    if value == setting.default:
        return "default" if value == base else f"override, {source} {shown(setting.key, base)}"
    default = f"default {shown(setting.key, setting.default) or 'empty'}"
    if value == base:
        return f"{source}, {default}"
    if base == setting.default:
        return f"override, {default}"
    return f"override, {source} {shown(setting.key, base)}, {default}"


def assignment(key: str, value: Any) -> str:
    """section.field=value, as a shell takes it."""
    return shlex.quote(f"{key}={shown(key, value)}")


def shown(key: str, value: Any) -> str:
    """A value as an override writes it; what is secret as stars."""
    if key in SECRETS and value:
        return "***"
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) and not _RESERVED.fullmatch(value)
        return value if plain else json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        value = {name: _plain(each) for name, each in value.items()}
    return json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """A section within a mapping as the fields that are set in it."""
    if not dataclasses.is_dataclass(value):
        return value
    return {name: each for name, each in vars(value).items() if each is not None}


def schema() -> str:
    """The JSON Schema of a run's YAML, for editors."""
    return json.dumps(TypeAdapter(Config).json_schema(), indent=1) + "\n"


@command(
    "completion",
    "print a script by which a shell completes commands, options and settings",
    argument("shell", choices=SHELLS),
    examples=("completion bash >> ~/.bashrc", "completion zsh > _megatron_stare"),
)
def _completion(options: argparse.Namespace) -> int:
    print(script(options.shell, command_parsers()), end="")
    return 0


def script(shell: str, commands: Mapping[str, argparse.ArgumentParser]) -> str:
    """The script for one of SHELLS, of these commands' parsers."""
    options = {name: _options(parser) for name, parser in commands.items()}
    sourced = [name for name, parser in commands.items() if _takes(parser, "source")]
    settable = [name for name, parser in commands.items() if _takes(parser, "overrides")]
    if shell == "fish":
        return _fish(options, sourced, settable)
    begin = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return begin + _bash(options, sourced, settable)


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [word for action in parser._actions for word in action.option_strings if word != "-h"]


def _takes(parser: argparse.ArgumentParser, name: str) -> bool:
    return any(action.dest == name and not action.option_strings for action in parser._actions)


def _bash(options: Mapping[str, list[str]], sourced: list[str], settable: list[str]) -> str:
    cases = "\n".join(
        f"        {name}) words='{' '.join(its)}' ;;" for name, its in options.items()
    )
    keys = " ".join(f"{key}=" for key in settings())
    return f"""_megatron_stare() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]}}" words=''
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W '{" ".join([*options, "--help", "--version"])}' -- "$word"))
        return
    fi
    case "$command" in
{cases}
        *) return ;;
    esac
    case " {" ".join(sourced)} " in
        *" $command "*) if [ "$COMP_CWORD" -eq 2 ]; then words="$words {" ".join(RECIPES)}"; fi ;;
    esac
    if [ "$COMP_CWORD" -gt 2 ] || [ "$command" = grade ]; then
        case " {" ".join(settable)} " in *" $command "*) words="$words {keys}" ;; esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word") $(compgen -f -- "$word"))
    case "${{COMPREPLY[0]}}" in *=) compopt -o nospace 2>/dev/null ;; esac
}}
complete -o filenames -F _megatron_stare {PROGRAM}
"""


def _fish(options: Mapping[str, list[str]], sourced: list[str], settable: list[str]) -> str:
    lines = [
        f"complete -c {PROGRAM} -n __fish_use_subcommand -f -a '{' '.join(options)}'",
        f"complete -c {PROGRAM} -n __fish_use_subcommand -l version",
    ]
    for name, its in options.items():
        for option in its:
            flag = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            lines.append(f"complete -c {PROGRAM} -n '__fish_seen_subcommand_from {name}' {flag}")
    seen = f"-n '__fish_seen_subcommand_from {' '.join(sourced)}'"
    lines.append(f"complete -c {PROGRAM} {seen} -a '{' '.join(RECIPES)}'")
    seen = f"-n '__fish_seen_subcommand_from {' '.join(settable)}'"
    lines.append(f"complete -c {PROGRAM} {seen} -a '{' '.join(f'{key}=' for key in settings())}'")
    return "\n".join(lines) + "\n"
