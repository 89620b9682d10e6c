"""The command line: python -m megatron_stare {train, evaluate, grade, convert, quantize, serve,
report}.

Exit codes: 0 done (or saved on SIGTERM / SIGUSR1), 1 a fault, 2 something only the user can put
right, in one line, 130 interrupted by Ctrl-C with a checkpoint to continue from.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import signal
import sys
from pathlib import Path

from megatron_stare import config as configuration
from megatron_stare.config import Config, MismatchAlarm, UserError, override
from megatron_stare.recipes import RECIPES, find_recipe

INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit code is its answer."""
    options = _parse(arguments)
    _quiet()
    try:
        return int(options.command(options))
    except UserError as error:
        rank = os.environ.get("RANK", "0")
        print(
            f"error{'' if rank == '0' else f' [rank {rank}]'}: {error}", file=sys.stderr, flush=True
        )
        return 2
    except MismatchAlarm as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except FloatingPointError as error:
        print(
            f"error: {error}; continue from the last checkpoint with a lower optimizer.lr",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command continues from the last checkpoint", file=sys.stderr)
        return INTERRUPTED


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    """Overrides may stand before and behind options, which argparse alone does not take."""
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
    commands = parser.add_subparsers(
        required=True, metavar="{train,evaluate,grade,convert,quantize,serve,report}"
    )
    source = f"a recipe ({', '.join(RECIPES)}), a config.yaml, or a run directory"

    train = commands.add_parser("train", help="train, or continue, a run")
    train.add_argument("source", help=source)
    train.add_argument("overrides", nargs="*", help="section.field=value")
    train.add_argument("--seeds", help="repeat a comparison over these seeds, e.g. 0,1,2")
    train.add_argument(
        "--load",
        default="latest",
        help="latest, latest-good (past damaged ones), or a checkpoint like step_00000050",
    )
    train.set_defaults(command=_train)

    evaluate = commands.add_parser(
        "evaluate", help="avg@k, pass@k and majority@k of a checkpoint; resumable"
    )
    evaluate.add_argument("source", help=source)
    evaluate.add_argument("overrides", nargs="*", help="section.field=value")
    evaluate.set_defaults(command=_evaluate)

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
    grade.set_defaults(command=_grade)

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
    convert.set_defaults(command=_convert)

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
    quantize.add_argument("--format", default="fp8", help="fp8 (default), int8 or nvfp4")
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
    quantize.set_defaults(command=_quantize)

    serve = commands.add_parser(
        "serve", help="SGLang servers for sglang.urls of other runs, until Ctrl-C"
    )
    serve.add_argument("source", help=source)
    serve.add_argument("overrides", nargs="*", help="section.field=value")
    serve.set_defaults(command=_serve)

    report = commands.add_parser(
        "report", help="plots and report.html of a run or comparison directory"
    )
    report.add_argument("directory", type=Path)
    report.set_defaults(command=_report)
    return parser


def _train(options: argparse.Namespace) -> int:
    config = _config(options)
    if options.seeds:
        config = override(config, [f"compare.seeds=[{options.seeds}]"])
    from megatron_stare.compare.compare import compare
    from megatron_stare.loop.interrupt import Interrupt
    from megatron_stare.loop.trainer import Trainer
    from megatron_stare.policy import topology as topologies
    from megatron_stare.reporting.report import write_report

    with topologies.session(config.policy, config.run.seed) as topology, Interrupt() as interrupt:
        if config.compare.arms:
            complete = compare(config, topology, interrupt, _own_command())
        else:
            complete = Trainer(config, topology, options.load).run(interrupt)
            if complete and topology.is_first:
                write_report(Path(config.run.dir))
        if topology.is_first:
            _tell(config, complete)
    return INTERRUPTED if interrupt.noted == signal.SIGINT and not complete else 0


def _tell(config: Config, complete: bool) -> None:
    from megatron_stare.reporting.console import print_summary

    if not complete:
        print(f"stopped; `{_own_command()}` continues from the last checkpoint", file=sys.stderr)
        return
    print_summary(Path(config.run.dir))
    print(f"report: {Path(config.run.dir) / 'report.html'}")


def _evaluate(options: argparse.Namespace) -> int:
    config = _config(options)
    from megatron_stare.loop.evaluation.evaluation import evaluate_checkpoint, write_problems
    from megatron_stare.policy import topology as topologies
    from megatron_stare.reporting.console import print_evaluation, print_problems

    with topologies.session(config.policy, config.run.seed) as topology:
        metrics, problems = evaluate_checkpoint(config, topology)
    if topology.is_first:
        target = Path(config.run.dir) / "evaluation.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(metrics, indent=2) + "\n")
        print_evaluation(metrics)
        print_problems(problems)
        print(f"written: {target}, {write_problems(problems, Path(config.run.dir))}")
    return 0


def _grade(options: argparse.Namespace) -> int:
    from megatron_stare.commands.grade import grade

    grade(options.file, options.output, options.overrides)
    return 0


def _convert(options: argparse.Namespace) -> int:
    from megatron_stare.commands import convert as convert_command

    return convert_command.run(
        options.direction,
        options.checkpoint,
        options.target,
        options.dtype,
        options.verify,
        options.prompts,
    )


def _quantize(options: argparse.Namespace) -> int:
    from megatron_stare.commands.quantize import QuantizeOptions, quantize

    fields = {name: value for name, value in vars(options).items() if name != "command"}
    quantize(QuantizeOptions(**fields | {"overrides": tuple(options.overrides)}))
    return 0


def _serve(options: argparse.Namespace) -> int:
    config = _config(options)
    from megatron_stare.commands.serve import serve
    from megatron_stare.loop.interrupt import Interrupt

    with Interrupt() as interrupt:
        serve(config, interrupt)
    return 0


def _report(options: argparse.Namespace) -> int:
    from megatron_stare.reporting.report import write_report

    print(f"report: {write_report(options.directory)}")
    return 0


def _config(options: argparse.Namespace) -> Config:
    """The Config of a recipe name, a config.yaml or a run directory, with the overrides applied."""
    path = Path(options.source)
    directory = path if path.is_dir() else None
    if directory:
        path = directory / "config.yaml"
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise UserError(
                f"{path} does not exist; give a recipe ({', '.join(RECIPES)}) or a run's "
                "config.yaml"
            )
        config = configuration.load(path)
        if os.environ.get("RANK", "0") == "0":
            for line in configuration.moved_keys(path):
                print(f"{path}: {line}", file=sys.stderr)
        if directory:
            config = dataclasses.replace(
                config, run=dataclasses.replace(config.run, dir=str(directory))
            )
    else:
        config = find_recipe(options.source)
    return override(config, options.overrides)


def _own_command() -> str:
    return shlex.join(
        ["python", "-m", "megatron_stare", *configuration.without_secrets(sys.argv[1:])]
    )


def _quiet() -> None:
    """Third parties' banners; our own messages and every error stay."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


if __name__ == "__main__":
    sys.exit(main())
