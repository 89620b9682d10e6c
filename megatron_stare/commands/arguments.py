"""The table of commands: `@command` declares a command's arguments next to its code."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from megatron_stare.config import nearest
from megatron_stare.config.aliases import setting_of_option
from megatron_stare.reporting.provenance import commit, versions

Code = Callable[[argparse.Namespace], int]
Argument = tuple[tuple[str, ...], dict[str, Any]]  # names and options of argparse's add_argument


@dataclass(frozen=True)
class Command:
    """One command: what --help says of it, its arguments, and its code, which returns the exit
    code.
    """

    purpose: str
    examples: tuple[str, ...]
    arguments: tuple[Argument, ...]
    run: Code

    def fill(self, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """The parser with this command's arguments."""
        for names, options in self.arguments:
            parser.add_argument(*names, **options)
        return parser


COMMANDS: dict[str, Command] = {}


def argument(*names: str, **options: Any) -> Argument:
    """An argument of a command."""
    return names, options


_SOURCE_HELP = "a recipe (`recipes` lists them), a YAML file, or a run directory"
SOURCE = argument("source", help=_SOURCE_HELP)
OPTIONAL_SOURCE = argument("source", nargs="?", default="", help=_SOURCE_HELP)
OVERRIDES = argument(
    "overrides", nargs="*", default=[], help="section.field=value, e.g. optimizer.lr=1e-6"
)


def command(
    name: str, purpose: str, *arguments: Argument, examples: tuple[str, ...] = ()
) -> Callable[[Code], Code]:
    """Put a function into the table of commands."""

    def register(run: Code) -> Code:
        COMMANDS[name] = Command(purpose, examples or (name,), arguments, run)
        return run

    return register


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options of one command; `command` is its name.

    Overrides may stand before and after options, which argparse alone does not accept.
    """
    words = sys.argv[1:] if arguments is None else arguments
    parser = _parser()
    if not words:
        parser.error(f"a command is missing; give one of {', '.join(COMMANDS)}")
    if words[0] not in (*COMMANDS, "-h", "--help", "--version"):
        parser.error(f"command {words[0]!r} is unknown{nearest(words[0], COMMANDS)}")
    if words[0] in COMMANDS:
        _refuse_unknown_options(parser, words)
    options, rest = parser.parse_known_args(words)
    if rest and (any(each.startswith("-") for each in rest) or not hasattr(options, "overrides")):
        parser.error(f"{words[0]} takes no {' '.join(rest)!r}; `{words[0]} --help` shows its usage")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def is_first_rank() -> bool:
    """Whether this process is the first of those that torchrun or srun started."""
    return os.environ.get("RANK", "0") == "0"


def command_parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of every command, without its texts."""
    return {name: each.fill(argparse.ArgumentParser()) for name, each in COMMANDS.items()}


def _refuse_unknown_options(parser: argparse.ArgumentParser, words: list[str]) -> None:
    """Refuse unknown options before argparse does, which would complain of other missing arguments
    because of them.
    """
    own = COMMANDS[words[0]].arguments
    known = [name for names, _ in own for name in names if name.startswith("--")] + ["--help"]
    for place, word in enumerate(words[1:], start=1):
        option, _, value = word.partition("=")
        if not option.startswith("--") or any(name.startswith(option) for name in known):
            continue
        close = difflib.get_close_matches(option.replace("_", "-"), known, n=1, cutoff=0.75)
        key = setting_of_option(option, exact=bool(close))
        if close and not key:
            hint = f"did you mean {close[0]!r}?"
        elif key:
            following = words[place + 1 :][:1]
            free = following and not following[0].startswith("-") and "=" not in following[0]
            value = value or (following[0] if free else "VALUE")
            hint = f"it is a setting here: write {key}={value}"
        else:
            hint = f"`{words[0]} --help` lists options; settings are section.field=value"
        parser.error(f"option {option!r} is unknown; {hint}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="megatron_stare", description="RL with verifiable rewards on Megatron-Core."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="versions, and the commit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, each in COMMANDS.items():
        examples = "\n".join(f"  python -m megatron_stare {line}" for line in each.examples)
        each.fill(
            commands.add_parser(
                name,
                help=each.purpose,
                description=f"{each.purpose[0].upper()}{each.purpose[1:]}.",
                epilog=f"examples:\n{examples}",
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
        )
    return parser


class _Parser(argparse.ArgumentParser):
    """Prints its help without argparse's silence about a closed pipe, and an error as one line."""

    def error(self, message: str) -> NoReturn:
        usage = f"; `{self.prog} --help` shows the usage" if "required" in message else ""
        self.exit(2, f"error: {message}{usage}\n")

    def print_help(self, file: Any = None) -> None:
        (file or sys.stdout).write(self.format_help())


class _Version(argparse.Action):
    """Prints this package with its commit, and the versions that decide how it behaves, one line
    each, and ends; other commands do not pay for finding them.
    """

    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> None:
        its = f" (commit {found})" if (found := commit()) else ""
        lines = [f"{name} {version or 'is not installed'}" for name, version in versions().items()]
        print("\n".join([lines[0] + its, *lines[1:]]))
        parser.exit()
