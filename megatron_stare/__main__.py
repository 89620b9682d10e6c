"""The command line, python -m megatron_stare COMMAND: each function under @command is a command.

Exit codes: 0 done, solved, or saved on SIGTERM / SIGUSR1, 1 a fault, 2 something only the user can
put right, in one line, 75 a hang that the watchdog ended, 130 interrupted by Ctrl-C with a
checkpoint to continue from, 141 the reader of the output has gone.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import select
import signal
import sys
import tempfile
from pathlib import Path

import megatron_stare.commands.gpuday.command  # noqa: F401  (registers its command)
from megatron_stare.api import evaluate, train
from megatron_stare.commands.arguments import (
    COMMANDS,
    OPTIONAL_SOURCE,
    OVERRIDES,
    SOURCE,
    argument,
    command,
    config_of,
    is_first_rank,
    own_command,
    parse,
)
from megatron_stare.config import Config, RunAlarm, UserError, check_arms, override
from megatron_stare.config.environment import prepare_environment, quiet_libraries
from megatron_stare.recipes import RECIPES, find_recipe

INTERRUPTED = 130
CLOSED_PIPE = 128 + signal.SIGPIPE


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit code is its answer."""
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()  # here, because at exit an error of it is a traceback
    except BrokenPipeError:
        if not _reader_has_gone(sys.stdout.fileno(), sys.stderr.fileno()):
            raise  # another pipe than the output's
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return CLOSED_PIPE


def _reader_has_gone(*descriptors: int) -> bool:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _run(arguments: list[str] | None) -> int:
    options = parse(arguments)
    quiet_libraries()
    try:
        return COMMANDS[options.command].run(options)
    except UserError as error:
        rank = os.environ.get("RANK", "0")
        print(
            f"error{'' if rank == '0' else f' [rank {rank}]'}: {error}", file=sys.stderr, flush=True
        )
        return 2
    except (RunAlarm, FloatingPointError) as error:
        remedy = "; continue from the last checkpoint with a lower optimizer.lr"
        print(f"error: {error}{'' if isinstance(error, RunAlarm) else remedy}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command starts from the last checkpoint, if any", file=sys.stderr)
        return INTERRUPTED


@command(
    "train",
    "start or resume a run",
    SOURCE,
    OVERRIDES,
    argument("--force", action="store_true", help="start even if the plan says it does not fit"),
    argument("--dry-run", action="store_true", help="check all that can be; train nothing"),
    argument("--seeds", help="repeat a comparison with these seeds, e.g. 0,1,2"),
    argument(
        "--load",
        default="latest",
        help="latest, latest-good (skips damaged ones), or a checkpoint such as step_00000050",
    ),
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
        return _dry_run(options.source, config)
    prepare_environment(config.policy)  # before anything asks CUDA
    if not options.force:
        from megatron_stare.commands.plan import refuse_on_gpus

        refuse_on_gpus(config)
    return _trained(config, options.load)


def _trained(config: Config, load: str = "latest") -> int:
    """Train, and print the result. The exit code."""
    from megatron_stare.loop.interrupt import Interrupt
    from megatron_stare.reporting.console import print_summary

    interrupt = Interrupt(exits=True)
    result = train(config, load=load, interrupt=interrupt)
    if is_first_rank() and result.complete:
        print_summary(result.directory)
        print(f"report: {result.directory / 'report.html'}")
    elif is_first_rank():
        print(f"stopped; `{own_command()}` continues from the last checkpoint", file=sys.stderr)
    return INTERRUPTED if interrupt.noted == signal.SIGINT and not result.complete else 0


def _dry_run(source: str, config: Config) -> int:
    from megatron_stare.commands.dry_run import dry_run
    from megatron_stare.compare.compare import on_paper

    if not is_first_rank():
        return 0  # the first rank checks for all
    with tempfile.TemporaryDirectory() as place:
        faults = dry_run(source, config, on_paper(config, Path(place)))
    return 2 if faults else 0


def _replay(options: argparse.Namespace) -> int:
    if options.overrides:
        raise UserError(f"--replay takes no overrides; remove {' '.join(options.overrides)}")
    from megatron_stare.commands.replay import replay

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
    from megatron_stare.commands.bundle import bundle

    target, size = bundle(options.run, options.step, options.output)
    print(f"written: {target}, {size / 2**20:.1f} MiB")
    return 0


@command(
    "compare",
    "train several objectives from one start and report them side by side; resumable",
    SOURCE,
    OVERRIDES,
    argument("--losses", required=True, help="the recipe's arms or objectives, e.g. stare,dapo"),
    argument("--seeds", help="seeds of every arm, e.g. 0,1,2; default: run.seed"),
    examples=(
        "compare quickstart --losses stare,dapo",
        "compare run.yaml --losses stare,grpo --seeds 0,1",
    ),
)
def _compare(options: argparse.Namespace) -> int:
    config = config_of(options.source, options.overrides)
    if options.source in RECIPES and config.run.dir == find_recipe(options.source).run.dir:
        config = override(config, [f"run.dir={config.run.dir}_losses"])
    if options.seeds:
        config = override(config, [f"compare.seeds=[{options.seeds}]"])
    from megatron_stare.compare.compare import between_losses

    config = between_losses(config, options.losses.split(","))
    check_arms(config, options.overrides)
    return _trained(config)


@command(
    "evaluate",
    "measure avg@k, pass@k and majority@k of a checkpoint; resumable",
    SOURCE,
    OVERRIDES,
    examples=("evaluate runs/mine", "evaluate run.yaml policy.hf_checkpoint=models/mine"),
)
def _evaluate(options: argparse.Namespace) -> int:
    config = config_of(options.source, options.overrides)
    from megatron_stare.reporting.console import print_evaluation, print_problems

    found = evaluate(config)
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
    from megatron_stare.commands.parity import run

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


@command(
    "convert",
    "convert checkpoints between Hugging Face and Megatron, or a GGUF file to Hugging Face",
    argument("direction", choices=["hf-to-megatron", "megatron-to-hf", "gguf-to-hf"]),
    argument(
        "checkpoint", metavar="SOURCE", type=Path, help="a model, a run, a checkpoint, a file"
    ),
    argument("target", metavar="TARGET", type=Path, help="a directory that does not exist yet"),
    argument("--dtype", choices=["fp32", "bf16"], default="", help="default: that of SOURCE"),
    argument("--verify", action="store_true", help="compare every byte and both models' logits"),
    argument("--prompts", default="", help="with --verify: a text file, one prompt per line"),
    examples=(
        "convert megatron-to-hf runs/mine exported",
        "convert gguf-to-hf model.gguf models/mine",
    ),
)
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


@command(
    "fetch",
    "download a small pretrained language model; nothing is installed",
    argument("model", help="smollm2-135m, or a Hugging Face Hub id owner/name"),
    argument("target", type=Path, help="a new directory"),
    argument("--dtype", choices=["fp32", "bf16"], default="bf16", help="of its weights (bf16)"),
    examples=("fetch smollm2-135m models/smollm2", "fetch Qwen/Qwen3-0.6B models/qwen3"),
)
def _fetch(options: argparse.Namespace) -> int:
    from megatron_stare.commands.fetch import fetch

    return fetch(options.model, options.target, options.dtype)


@command(
    "quantize",
    "quantize a checkpoint for rollout servers and measure the error",
    argument("source", type=Path, help="a Hugging Face model directory"),
    argument("target", type=Path, help="a new directory"),
    OVERRIDES,
    argument("--calibration", required=True, metavar="FILE", help=".jsonl or .parquet of prompts"),
    argument("--format", default="fp8", help="fp8 (default), int8, nvfp4 or fp8_experts"),
    argument("--samples", type=int, default=512, help="prompts to calibrate on (512)"),
    argument("--held-out", type=int, default=64, help="other prompts to measure on (64)"),
    argument("--response-tokens", type=int, default=0, help="tokens sampled for each prompt (0)"),
    argument("--seed", type=int, default=0, help="seed of prompt order and responses (0)"),
    examples=(
        "quantize models/A models/A-FP8 --calibration a.jsonl",
        "quantize models/A models/A-INT8 --calibration a.jsonl --format int8",
    ),
)
def _quantize(options: argparse.Namespace) -> int:
    from megatron_stare.commands.quantize import QuantizeOptions, quantize

    given = {each.name: getattr(options, each.name) for each in dataclasses.fields(QuantizeOptions)}
    quantize(QuantizeOptions(**given | {"overrides": tuple(options.overrides)}))
    return 0


@command(
    "serve",
    "start SGLang servers for sglang.urls of other runs, until Ctrl-C",
    SOURCE,
    OVERRIDES,
    examples=("serve short_cot_7b", "serve short_cot_7b sglang.port=30000"),
)
def _serve(options: argparse.Namespace) -> int:
    config = config_of(options.source, options.overrides)
    from megatron_stare.commands.servers.serve import serve
    from megatron_stare.loop.interrupt import Interrupt

    with Interrupt(exits=True) as interrupt:
        serve(config, interrupt)
    return 0


@command(
    "relay",
    "receive weights near servers on a slow link (sglang.sync_method=delta)",
    argument("directory", type=Path, help="a directory of its own that the servers can read"),
    argument("--host", default="127.0.0.1", help="interface to listen on (127.0.0.1)"),
    argument("--port", type=int, default=31000, help="port to listen on (31000); 0: any free one"),
    examples=("relay /shared/relay", "relay /shared/relay --host 0.0.0.0 --port 31000"),
)
def _relay(options: argparse.Namespace) -> int:
    from megatron_stare.commands.servers.relay import relay
    from megatron_stare.loop.interrupt import Interrupt

    with Interrupt(exits=True) as interrupt:
        relay(options.directory, options.host, options.port, interrupt)
    return 0


@command(
    "plan",
    "estimate memory, work and time of a run before it starts; exit code 1 if it does not fit",
    OPTIONAL_SOURCE,
    OVERRIDES,
    argument("--pages", metavar="DIR", type=Path, help="write recipes.md and scale.md there"),
    argument("--list", action="store_true", help="print one line for every recipe"),
    argument("--gpus", type=int, default=0, help="trainer GPUs; default: the recipe's"),
    argument("--rollout-gpus", type=int, default=-1, help="server GPUs; default: the recipe's"),
    argument("--response-tokens", type=float, default=0.0, help="mean length (half the limit)"),
    argument("--suggest", action="store_true", help="find the cheapest layout that fits"),
    argument("--machine", type=Path, metavar="FILE", help="figures of a machine, from gpuday"),
    examples=("plan --list", "plan short_cot_7b --gpus 8 --suggest"),
)
def _plan(options: argparse.Namespace) -> int:
    if options.pages:
        from megatron_stare.planning.pages import write_pages

        text, fits = "\n".join(map(str, write_pages(options.pages))), True
    elif options.list:
        from megatron_stare.commands.plan import listed

        text, fits = listed()
    elif not options.source:
        raise UserError("plan needs a recipe, a config.yaml or a run; or --list")
    else:
        config = config_of(options.source, options.overrides)  # typos fail before torch's import
        from megatron_stare.commands.plan import planned

        text, fits = planned(
            options.source,
            config,
            gpus=options.gpus,
            rollout_gpus=options.rollout_gpus,
            response_tokens=options.response_tokens,
            cheapest=options.suggest,
            machine=options.machine,
        )
    print(text)
    return 0 if fits else 1


@command("recipes", "list every recipe with its GPUs and its purpose", examples=("recipes",))
def _recipes(options: argparse.Namespace) -> int:
    from megatron_stare.commands.listings.recipes import text

    print(text())
    return 0


@command(
    "config",
    "print every setting of a run with its value, the origin of the value and its meaning",
    OPTIONAL_SOURCE,
    OVERRIDES,
    argument("--only", default="", help="a section, or the beginning of a key, e.g. loss"),
    argument("--page", metavar="FILE", type=Path, help="write all settings as Markdown"),
    argument("--schema", metavar="FILE", type=Path, help="write a JSON Schema of a run's YAML"),
    examples=("config quickstart", "config quickstart --only loss"),
)
def _settings(options: argparse.Namespace) -> int:
    from megatron_stare.commands.listings import configuration as listing

    for target, write in ((options.page, listing.page), (options.schema, listing.schema)):
        if target:
            target.write_text(write(), encoding="utf-8")
            print(f"written: {target}")
            return 0
    if not options.source:
        raise UserError("config needs a recipe, a YAML file or a run directory")
    base = config_of(options.source, [])
    source = "recipe" if options.source in RECIPES else "config.yaml"
    print(listing.text(base, override(base, options.overrides), source, options.only))
    return 0


@command(
    "completion",
    "print a script by which a shell completes commands, options and settings",
    argument("shell", choices=["bash", "zsh", "fish"]),
    examples=("completion bash >> ~/.bashrc", "completion zsh > _megatron_stare"),
)
def _completion(options: argparse.Namespace) -> int:
    from megatron_stare.commands.arguments import command_parsers
    from megatron_stare.commands.listings.completion import script

    print(script(options.shell, command_parsers()), end="")
    return 0


@command(
    "doctor",
    "check whether this machine, or a cluster, is ready; exit code 1 if it is not",
    OPTIONAL_SOURCE,
    OVERRIDES,
    argument("--cluster", action="store_true", help="check every rank of torchrun or srun"),
    examples=("doctor", "doctor short_cot_7b"),
)
def _doctor(options: argparse.Namespace) -> int:
    from megatron_stare.commands.doctor import examine, print_findings

    config = config_of(options.source, options.overrides) if options.source else Config()
    if not options.cluster:
        return print_findings(examine(config))
    from megatron_stare.commands.cluster import examine_cluster

    return print_findings(examine_cluster(config))


@command(
    "report",
    "write or serve one page about runs and comparisons",
    argument("directories", type=Path, nargs="+", metavar="RUN", help="run directories"),
    argument("--output", type=Path, metavar="FILE.html", help="default: report.html in the run"),
    argument("--watch", action="store_true", help="serve the page on this machine during training"),
    argument("--port", type=int, default=8765, help="port of --watch (8765); 0: any free one"),
    examples=("report runs/mine", "report runs/a runs/b --output both.html"),
)
def _report(options: argparse.Namespace) -> int:
    from megatron_stare.reporting.report import watch, write_report

    if options.watch:
        if options.output:
            raise UserError("--watch serves the page and writes none; leave out --output")
        watch(options.directories, options.port)
    else:
        print(f"report: {write_report(options.directories, options.output)}")
    return 0


@command(
    "algorithms",
    "list every objective, or show one with its settings",
    argument("name", nargs="?", default="", help="an objective, e.g. ce_gppo"),
    examples=("algorithms", "algorithms stare"),
)
def _algorithms(options: argparse.Namespace) -> int:
    if options.name:
        from megatron_stare.commands.listings.algorithms import page

        print(page(options.name))
    else:
        from megatron_stare.commands.listings.declarations import text

        print(text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
