"""The table of commands: `@command` declares a command's arguments next to its code."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_stare.config import Config, UserError, load, nearest, override, without_secrets
from megatron_stare.config.aliases import ALIASES, nearest_key
from megatron_stare.config.settings import settings
from megatron_stare.recipes import RECIPES, find_recipe

Code = Callable[[argparse.Namespace], int]


@dataclass(frozen=True)
class Argument:
    """One argument of a command, as argparse takes it."""

    names: tuple[str, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class Command:
    """One command: what --help says of it, its arguments, and its code, which returns the exit
    code.
    """

    purpose: str
    example: str
    arguments: tuple[Argument, ...]
    run: Code

    def fill(self, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """The parser with this command's arguments."""
        for each in self.arguments:
            parser.add_argument(*each.names, **each.options)
        return parser


COMMANDS: dict[str, Command] = {}


def argument(*names: str, **options: Any) -> Argument:
    """An argument of a command: names and options of argparse's add_argument."""
    return Argument(names, options)


_SOURCE_HELP = "a recipe (`recipes` lists them), a YAML file, or a run directory"
SOURCE = argument("source", help=_SOURCE_HELP)
OPTIONAL_SOURCE = argument("source", nargs="?", default="", help=_SOURCE_HELP)
OVERRIDES = argument("overrides", nargs="*", help="section.field=value, e.g. optimizer.lr=1e-6")


def command(
    name: str, purpose: str, *arguments: Argument, example: str = ""
) -> Callable[[Code], Code]:
    """Put a function into the table of commands."""

    def register(run: Code) -> Code:
        COMMANDS[name] = Command(purpose, example or name, arguments, run)
        return run

    return register


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options of one command; `command` is its name.

    Overrides may stand before and after options, which argparse alone does not accept.
    """
    words = sys.argv[1:] if arguments is None else arguments
    parser = _parser()
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        parser.error(f"command {words[0]!r} is unknown{nearest(words[0], COMMANDS)}")
    options, rest = parser.parse_known_args(words)
    unknown = [word for word in rest if word.startswith("-")]
    if unknown or (rest and not hasattr(options, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(rest)}{_as_override(unknown)}")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def config_of(source: str, overrides: list[str]) -> Config:
    """The Config of a recipe, a YAML file or a run directory, with the overrides applied."""
    path = Path(source)
    directory = path if path.is_dir() else None
    if directory:
        path = directory / "config.yaml"
    if path.suffix not in (".yaml", ".yml"):
        return override(find_recipe(source), overrides)
    if not path.is_file():
        raise UserError(
            f"{path} does not exist; give a recipe ({', '.join(RECIPES)}), a YAML file or a run "
            "directory"
        )
    config = load(path)
    if directory:
        run = dataclasses.replace(config.run, dir=str(directory))
        config = dataclasses.replace(config, run=run)
    return override(config, overrides)


def own_command() -> str:
    """This process's command as it may be shown."""
    return shlex.join(["python", "-m", "megatron_stare", *without_secrets(sys.argv[1:])])


def is_first_rank() -> bool:
    """Whether this process is the first of those that torchrun or srun started."""
    return os.environ.get("RANK", "0") == "0"


def command_parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of every command, without its texts."""
    return {name: each.fill(argparse.ArgumentParser()) for name, each in COMMANDS.items()}


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="megatron_stare", description="RL with verifiable rewards on Megatron-Core."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="versions, and the commit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, each in COMMANDS.items():
        example = f"example: python -m megatron_stare {each.example}"
        each.fill(
            commands.add_parser(
                name, help=each.purpose, description=f"{each.purpose}.", epilog=example
            )
        )
    return parser


def _as_override(options: list[str]) -> str:
    """A hint for options that are settings here, e.g. slime's --rollout-batch-size."""
    for option in options:
        name = option.lstrip("-").partition("=")[0].replace("-", "_")
        if name in ALIASES or any(key.endswith(f".{name}") for key in settings()):
            return f"; settings have no dashes: write {nearest_key(name)}=VALUE"
    return ""


class _Parser(argparse.ArgumentParser):
    """Prints its help without argparse's silence about a closed pipe."""

    def print_help(self, file: Any = None) -> None:
        (file or sys.stdout).write(self.format_help())


class _Version(argparse.Action):
    """Prints versions and ends; other commands do not pay for finding them."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> None:
        from megatron_stare.commands.listings.version import text

        print(text())
        parser.exit()
