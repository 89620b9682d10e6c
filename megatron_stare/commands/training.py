"""The commands that train, repeat and judge: thin, so that large imports come after the checks."""

from __future__ import annotations

import argparse
import re
import signal
import sys
import tempfile
from pathlib import Path

from megatron_stare.api import evaluate, train
from megatron_stare.commands.arguments import OVERRIDES, SOURCE, argument, command, is_first_rank
from megatron_stare.config import Config, UserError, check_arms, override
from megatron_stare.config.environment import own_command, prepare_environment
from megatron_stare.recipes import RECIPES, config_of, find_recipe
from megatron_stare.system import atomic_file, json_line

INTERRUPTED = 130  # an exit code
LOAD = argument(
    "--load",
    default="latest",
    help="latest, latest-good (skips damaged ones), best (by run.keep_best), or a checkpoint such "
    "as step_00000050",
)
FORCE = argument("--force", action="store_true", help="start even if the plan does not fit")


@command(
    "train",
    "start or resume a run",
    SOURCE,
    OVERRIDES,
    FORCE,
    argument("--dry-run", action="store_true", help="check all that can be; train nothing"),
    argument("--seeds", help="repeat a comparison with these seeds, e.g. 0,1,2"),
    LOAD,
    argument("--replay", type=int, metavar="STEP", help="repeat a recorded step bit by bit"),
    argument("--losses", help="with --replay: evaluate these objectives, e.g. stare,dapo"),
    examples=("train quickstart optimizer.lr=5e-4", "train runs/mine/config.yaml --dry-run"),
)
def _train(options: argparse.Namespace) -> int:
    if options.replay is not None:
        return _replay(options)
    if options.losses:
        raise UserError("--losses goes with --replay STEP; to train them: compare --losses")
    config = config_of(options.source, options.overrides)
    if options.seeds:
        config = override(config, [f"compare.seeds=[{options.seeds}]"])
    check_arms(config, options.overrides)
    if options.dry_run:
        return _dry_run(options.source, config, options.load)
    return _trained(config, options.load, options.force)


def _trained(config: Config, load: str = "latest", force: bool = False) -> int:
    """Train, and print the result. The exit code."""
    prepare_environment(config.policy)  # before anything asks CUDA
    from megatron_stare.commands.plan import refuse_on_gpus
    from megatron_stare.loop.interrupt import Interrupt
    from megatron_stare.reporting.console import print_summary

    if not force:
        refuse_on_gpus(config)
    interrupt = Interrupt(exits=True)
    result = train(config, load=load, interrupt=interrupt, force=force)
    if is_first_rank() and result.complete:
        print_summary(result.directory)
        if (page := result.directory / "report.html").is_file():
            print(f"report: {page}")
    elif is_first_rank():
        again = re.sub(r" --load[= ]\S+", "", own_command())  # it would go back once more
        print(f"stopped; `{again}` continues from the last checkpoint", file=sys.stderr)
    return INTERRUPTED if interrupt.noted == signal.SIGINT and not result.complete else 0


def _dry_run(source: str, config: Config, load: str) -> int:
    from megatron_stare.compare.compare import check_load, on_paper
    from megatron_stare.debug.dry_run import dry_run

    if not is_first_rank():
        return 0  # the first rank checks for all
    check_load(config, load)
    with tempfile.TemporaryDirectory() as place:
        faults = dry_run(source, config, on_paper(config, Path(place)), load)
    return 2 if faults else 0


def _replay(options: argparse.Namespace) -> int:
    others = {"--load": options.load != "latest", "--seeds": options.seeds}
    others |= {"--dry-run": options.dry_run, "--force": options.force}
    if words := [*options.overrides, *(name for name, given in others.items() if given)]:
        raise UserError(f"--replay takes a run as it is; remove {' '.join(words)}")
    from megatron_stare.debug.replay import replay

    losses = options.losses.split(",") if options.losses else []
    return 0 if replay(Path(options.source), options.replay, losses) else 1


@command(
    "bundle",
    "write one file with all that a replay of a step needs",
    argument("run", metavar="RUN", type=Path, help="a run directory"),
    argument("step", metavar="STEP", type=int, help="a step as metrics.jsonl counts them"),
    argument("--output", metavar="FILE.tar", type=Path, help="default: RUN_step_STEP.tar"),
    examples=("bundle runs/mine 120", "bundle runs/mine 120 --output step.tar"),
)
def _bundle(options: argparse.Namespace) -> int:
    from megatron_stare.commands.recorded import bundle

    target, size = bundle(options.run, options.step, options.output)
    print(f"written: {target}, {size / 2**20:.1f} MiB")
    return 0


@command(
    "rollouts",
    "write the rollouts of a training step, or the responses of an evaluation, as rows of text",
    argument("run", metavar="RUN", type=Path, help="a run directory"),
    argument("--step", metavar="STEP", type=int, help="default: the newest that is kept"),
    argument("--evaluation", metavar="SET", default="", help="a set of evaluation.eval_data"),
    argument("--output", metavar="FILE.jsonl", type=Path, help="default: the terminal"),
    examples=("rollouts runs/mine --step 120", "rollouts runs/mine --evaluation aime24"),
)
def _rollouts(options: argparse.Namespace) -> int:
    from megatron_stare.commands.recorded import evaluated, trained

    name = options.evaluation
    run, step = options.run, options.step
    lines = map(json_line, evaluated(run, step, name) if name else trained(run, step))
    if options.output is None:
        sys.stdout.writelines(lines)
        return 0
    try:
        with atomic_file(options.output) as out:
            out.writelines(lines)
    except OSError as error:
        raise UserError(
            f"--output {options.output}: {error.strerror}; choose another place"
        ) from None
    print(f"written: {options.output}")
    return 0


@command(
    "compare",
    "train several objectives from one start and report them side by side; resumable",
    SOURCE,
    OVERRIDES,
    argument("--losses", required=True, help="the recipe's arms or objectives, e.g. stare,dapo"),
    argument("--seeds", help="seeds of every arm, e.g. 0,1,2; default: run.seed"),
    FORCE,
    examples=(
        "compare quickstart --losses stare,dapo",
        "compare run.yaml --losses stare,grpo --seeds 0,1",
    ),
)
def _compare(options: argparse.Namespace) -> int:
    config = config_of(options.source, options.overrides)
    if options.source in RECIPES and config.run.dir == find_recipe(options.source).run.dir:
        config = override(config, [f"run.dir={config.run.dir}_losses"])
    from megatron_stare.compare.compare import between_losses

    config = between_losses(config, options.losses.split(","))
    if options.seeds:
        config = override(config, [f"compare.seeds=[{options.seeds}]"])
    check_arms(config, options.overrides)
    return _trained(config, force=options.force)


@command(
    "evaluate",
    "measure avg@k, pass@k and majority@k of a checkpoint; resumable",
    SOURCE,
    OVERRIDES,
    LOAD,
    examples=("evaluate runs/mine", "evaluate run.yaml policy.hf_checkpoint=models/mine"),
)
def _evaluate(options: argparse.Namespace) -> int:
    config = config_of(options.source, options.overrides)
    from megatron_stare.reporting.console import print_evaluation, print_problems

    found = evaluate(config, load=options.load)
    if is_first_rank():
        print_evaluation(found.metrics)
        print_problems(found.problems)
        print(f"written: {', '.join(str(file) for file in found.files)}")
    return 0


@command(
    "parity",
    "compare servers and trainer on the same tokens; exit code 1 if they differ too much",
    SOURCE,
    OVERRIDES,
    argument("--prompts", type=int, default=8, help="prompts, with one response each (8)"),
    argument("--tokens", type=int, default=0, help="tokens of a response; default: at most 256"),
    examples=("parity short_cot_7b", "parity short_cot_7b --prompts 16 --tokens 512"),
)
def _parity(options: argparse.Namespace) -> int:
    config = config_of(options.source, options.overrides)
    from megatron_stare.debug.parity import run
    from megatron_stare.planning.plan import share_memory

    share_memory(config)
    return run(config, options.prompts, options.tokens)


@command(
    "grade",
    "judge the responses of a .jsonl file as a run would",
    argument("file", metavar="FILE", type=Path, help="rows with response and label"),
    OVERRIDES,
    argument("--output", required=True, metavar="OUT", type=Path, help="the rows with verdicts"),
    examples=(
        "grade a.jsonl --output b.jsonl",
        "grade a.jsonl --output b.jsonl scoring.reward=my.f",
    ),
)
def _grade(options: argparse.Namespace) -> int:
    from megatron_stare.commands.grade import grade

    grade(options.file, options.output, options.overrides)
    return 0
