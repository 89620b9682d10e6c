"""What the command line takes: one parser per command."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_stare.recipes import RECIPES

_SOURCE = f"a recipe ({', '.join(RECIPES)}), a config.yaml, or a run directory"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options of one command; `command` is its name.

    Overrides may stand before and behind options, which argparse alone does not take.
    """
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if any(word.startswith("-") for word in rest) or (rest and not hasattr(options, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron_stare", description="RL with verifiable rewards on Megatron-Core."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="versions, and the commit")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar=f"{{{','.join(_ADDED)}}}"
    )
    for add in _ADDED.values():
        add(commands)
    return parser


class _Version(argparse.Action):
    """Says it and ends; what it takes to find out is paid by this option alone."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> None:
        from megatron_stare.commands.listings.version import text

        print(text())
        parser.exit()


def command_parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of every command, for those who ask what it takes."""
    commands = argparse.ArgumentParser().add_subparsers()
    for add in _ADDED.values():
        add(commands)
    return dict(commands.choices)


def _train(commands: Any) -> None:
    train = commands.add_parser("train", help="train, or continue, a run")
    train.add_argument("source", help=_SOURCE)
    train.add_argument("overrides", nargs="*", help="section.field=value")
    train.add_argument(
        "--force", action="store_true", help="start also what does not fit by the plan"
    )
    train.add_argument(
        "--dry-run",
        action="store_true",
        help="check all that can be checked, line by line; train nothing, leave nothing behind",
    )
    train.add_argument("--seeds", help="repeat a comparison over these seeds, e.g. 0,1,2")
    train.add_argument(
        "--load",
        default="latest",
        help="latest, latest-good (past damaged ones), or a checkpoint like step_00000050",
    )
    train.add_argument(
        "--replay", type=int, metavar="STEP", help="take a recorded step of a run again, bit by bit"
    )
    train.add_argument(
        "--losses", help="with --replay: what these objectives ask of its tokens, e.g. stare,dapo"
    )


def _bundle(commands: Any) -> None:
    bundle = commands.add_parser(
        "bundle", help="what somebody else needs to replay a step of a run, in one file"
    )
    bundle.add_argument("run", metavar="RUN", type=Path, help="a run directory")
    bundle.add_argument("step", metavar="STEP", type=int, help="as metrics.jsonl counts")
    bundle.add_argument(
        "--output", metavar="FILE.tar", type=Path, help="default: RUN_step_STEP.tar here"
    )


def _compare(commands: Any) -> None:
    compare = commands.add_parser(
        "compare", help="several objectives from one start, side by side, in one report; resumable"
    )
    compare.add_argument("source", help=_SOURCE)
    compare.add_argument("overrides", nargs="*", help="section.field=value")
    compare.add_argument(
        "--losses", required=True, help="arms of the recipe or objectives, e.g. stare,dapo,steer"
    )
    compare.add_argument("--seeds", help="e.g. 0,1,2; default: run.seed")


def _evaluate(commands: Any) -> None:
    evaluate = commands.add_parser(
        "evaluate", help="avg@k, pass@k and majority@k of a checkpoint; resumable"
    )
    evaluate.add_argument("source", help=_SOURCE)
    evaluate.add_argument("overrides", nargs="*", help="section.field=value")


def _parity(commands: Any) -> None:
    parity = commands.add_parser(
        "parity",
        help="servers and trainer on the same tokens: how far apart, since where; exit code 1: far",
    )
    parity.add_argument("source", help=_SOURCE)
    parity.add_argument("overrides", nargs="*", help="section.field=value")
    parity.add_argument("--prompts", type=int, default=8, help="of the data, a response each (8)")
    parity.add_argument("--tokens", type=int, default=0, help="of a response; default: at most 256")


def _grade(commands: Any) -> None:
    grade = commands.add_parser(
        "grade", help="judge the responses of a .jsonl file, as a run would"
    )
    grade.add_argument("file", metavar="FILE", type=Path, help="rows with response and label")
    grade.add_argument(
        "overrides", nargs="*", help="section.field=value, e.g. scoring.extraction=boxed"
    )
    grade.add_argument(
        "--output", required=True, metavar="OUT", type=Path, help="the rows with their verdicts"
    )


def _convert(commands: Any) -> None:
    convert = commands.add_parser(
        "convert", help="Hugging Face <-> Megatron checkpoints, both ways"
    )
    convert.add_argument("direction", choices=["hf-to-megatron", "megatron-to-hf"])
    convert.add_argument(
        "checkpoint", metavar="SOURCE", type=Path, help="a model directory; or a run, a checkpoint"
    )
    convert.add_argument(
        "target", metavar="TARGET", type=Path, help="a directory that does not exist yet"
    )
    convert.add_argument(
        "--dtype", choices=["fp32", "bf16"], default="", help="default: as in SOURCE"
    )
    convert.add_argument(
        "--verify", action="store_true", help="compare every byte and both models' logits"
    )
    convert.add_argument("--prompts", default="", help="--verify: a text file, one prompt a line")


def _quantize(commands: Any) -> None:
    quantize = commands.add_parser(
        "quantize", help="a checkpoint for rollout servers, and the error this makes"
    )
    quantize.add_argument("source", type=Path, help="Hugging Face directory")
    quantize.add_argument("target", type=Path, help="new directory")
    quantize.add_argument(
        "overrides", nargs="*", help="data.field=value: how the calibration file is read"
    )
    quantize.add_argument(
        "--calibration", required=True, metavar="FILE", help=".jsonl or .parquet of prompts"
    )
    quantize.add_argument(
        "--format", default="fp8", help="fp8 (default), int8, nvfp4 or fp8_experts"
    )
    quantize.add_argument("--samples", type=int, default=512, help="prompts to calibrate on (512)")
    quantize.add_argument(
        "--held-out", type=int, default=64, help="other prompts to measure the error on (64)"
    )
    quantize.add_argument(
        "--response-tokens", type=int, default=0, help="sampled behind each prompt first (0)"
    )
    quantize.add_argument(
        "--seed", type=int, default=0, help="of the prompts' order and the responses (0)"
    )


def _serve(commands: Any) -> None:
    serve = commands.add_parser(
        "serve", help="SGLang servers for sglang.urls of other runs, until Ctrl-C"
    )
    serve.add_argument("source", help=_SOURCE)
    serve.add_argument("overrides", nargs="*", help="section.field=value")


def _mirror(commands: Any) -> None:
    mirror = commands.add_parser(
        "relay", help="receive weights near servers on a slow link (sglang.sync_method=delta)"
    )
    mirror.add_argument("directory", type=Path, help="its own, on a disk that the servers see")
    mirror.add_argument("--host", default="127.0.0.1", help="to listen on (127.0.0.1)")
    mirror.add_argument("--port", type=int, default=31000, help="31000; 0: any that is free")


def _plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan", help="memory, work and time of a run before it is launched; exit code 1: no fit"
    )
    plan.add_argument("source", nargs="?", default="", help=_SOURCE)
    plan.add_argument("overrides", nargs="*", help="section.field=value")
    plan.add_argument(
        "--pages", metavar="DIR", type=Path, help="write recipes.md and scale.md there"
    )
    plan.add_argument("--list", action="store_true", help="one line for every recipe")
    plan.add_argument("--gpus", type=int, default=0, help="that train; default: the recipe's")
    plan.add_argument(
        "--rollout-gpus", type=int, default=-1, help="of the servers; default: the recipe's"
    )
    plan.add_argument(
        "--response-tokens", type=float, default=0.0, help="mean length (half the limit)"
    )
    plan.add_argument("--suggest", action="store_true", help="find the cheapest layout that fits")


def _doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor", help="whether this machine, or a cluster, is ready; exit code 1: it is not"
    )
    doctor.add_argument("source", nargs="?", default="", help=f"{_SOURCE}; for what it needs")
    doctor.add_argument("overrides", nargs="*", help="section.field=value")
    doctor.add_argument(
        "--cluster", action="store_true", help="every rank of torchrun or srun, and between them"
    )


def _config(commands: Any) -> None:
    config = commands.add_parser(
        "config", help="every field of a run: its value, where that comes from, what it is for"
    )
    config.add_argument("source", nargs="?", default="", help=_SOURCE)
    config.add_argument("overrides", nargs="*", help="section.field=value")
    config.add_argument("--only", default="", help="a section, or how a field begins, e.g. loss")
    config.add_argument(
        "--page", metavar="FILE", type=Path, help="write the reference of all fields, in Markdown"
    )
    config.add_argument(
        "--schema", metavar="FILE", type=Path, help="write a JSON Schema of a run's YAML"
    )


def _completion(commands: Any) -> None:
    completion = commands.add_parser(
        "completion", help="a script by which a shell completes commands, options and fields"
    )
    completion.add_argument("shell", choices=["bash", "zsh", "fish"])


def _recipes(commands: Any) -> None:
    commands.add_parser("recipes", help="every recipe with its GPUs and what it is")


def _report(commands: Any) -> None:
    report = commands.add_parser(
        "report", help="one page of runs and comparisons, to read anywhere or to watch"
    )
    report.add_argument("directories", type=Path, nargs="+", metavar="RUN")
    report.add_argument("--output", type=Path, metavar="FILE.html")
    report.add_argument("--watch", action="store_true", help="serve it while they train, here only")
    report.add_argument("--port", type=int, default=8765, help="of --watch; 0: any that is free")


def _algorithms(commands: Any) -> None:
    algorithms = commands.add_parser(
        "algorithms", help="every objective: family, needs, source; or one with its settings"
    )
    algorithms.add_argument("name", nargs="?", default="", help="e.g. ce_gppo")


_ADDED: dict[str, Callable[[Any], None]] = {
    "train": _train,
    "bundle": _bundle,
    "compare": _compare,
    "evaluate": _evaluate,
    "parity": _parity,
    "grade": _grade,
    "convert": _convert,
    "quantize": _quantize,
    "serve": _serve,
    "relay": _mirror,
    "plan": _plan,
    "recipes": _recipes,
    "config": _config,
    "doctor": _doctor,
    "report": _report,
    "algorithms": _algorithms,
    "completion": _completion,
}
