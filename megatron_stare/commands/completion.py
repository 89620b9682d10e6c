"""`completion SHELL`: a script that completes commands, options, recipes and fields.

Everything it knows is written into it, so that a press of Tab starts no Python.

    source <(python -m megatron_stare completion bash)      # bash, zsh
    python -m megatron_stare completion fish | source
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from megatron_stare.config.run import settings
from megatron_stare.recipes import RECIPES

SHELLS = ("bash", "zsh", "fish")
PROGRAM = "megatron-stare"


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
