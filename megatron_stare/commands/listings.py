"""The commands that estimate, examine and report. None imports torch, except for a plan and for a
doctor on a GPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_stare.commands.arguments import OPTIONAL_SOURCE, OVERRIDES, argument, command
from megatron_stare.config import Config, UserError
from megatron_stare.recipes import cluster_of, config_of


@command(
    "plan",
    "estimate memory, work and time of a run before it starts; exit code 1 if it does not fit",
    OPTIONAL_SOURCE,
    OVERRIDES,
    argument("--list", action="store_true", help="print one line for every recipe"),
    argument("--gpus", type=int, default=0, help="trainer GPUs; default: the recipe's"),
    argument("--rollout-gpus", type=int, default=-1, help="server GPUs; default: the recipe's"),
    argument("--response-tokens", type=float, default=0.0, help="mean length (half the limit)"),
    argument("--suggest", action="store_true", help="find the cheapest layout that fits"),
    argument("--machine", type=Path, metavar="FILE", help="figures of a machine, from gpuday"),
    argument("--calibration", action="store_true", help="print published runs next to their plans"),
    examples=("plan --list", "plan short_cot_7b --gpus 8 --suggest"),
)
def _plan(options: argparse.Namespace) -> int:
    if options.calibration:
        from megatron_stare.planning.calibration import table
        from megatron_stare.planning.tables import aligned

        text, fits = aligned(table()), True
    elif options.list:
        from megatron_stare.commands.plan import listed

        text, fits = listed()
    elif not options.source:
        raise UserError("plan needs a recipe, a config.yaml or a run; or --list")
    else:
        config = config_of(options.source, options.overrides)  # typos fail before torch's import
        from megatron_stare.commands.plan import planned

        text, fits = planned(config, options)
    print(text)
    return 0 if fits else 1


@command(
    "speculate",
    "compute from a run's recorded rollouts how many tokens n-gram drafts would save",
    argument("run", type=Path, help="a run directory with records (run.record=all)"),
    argument("--draft-tokens", default="1,2,4,8", metavar="K,K", help="drafted in a decoding step"),
    argument("--match", type=int, default=8, help="tokens of the longest suffix to look for"),
    argument("--steps", type=int, default=0, help="the newest N recorded steps; default: all"),
    argument("--recipe", default="long_cot_32b", help="a recipe, of which to plan the seconds"),
    examples=("speculate runs/mine", "speculate runs/mine --draft-tokens 4 --recipe long_cot_7b"),
)
def _speculate(options: argparse.Namespace) -> int:
    words = options.draft_tokens.split(",")
    if not all(word.isdigit() and int(word) for word in words):
        raise UserError(f"--draft-tokens {options.draft_tokens} must be positive numbers, e.g. 2,4")
    for name in ("match", "steps"):
        if (value := getattr(options, name)) < (name == "match"):
            raise UserError(f"--{name} {value} must be positive")
    if cluster_of(options.recipe) is None:
        raise UserError(f"--recipe {options.recipe} must name a recipe with GPUs; see `recipes`")
    from megatron_stare.debug.speculation import speculation_text

    counts = [int(word) for word in words]
    print(speculation_text(options.run, counts, options.match, options.steps, options.recipe))
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
    from megatron_stare.debug.doctor import examine, print_findings

    config = config_of(options.source, options.overrides) if options.source else Config()
    if not options.cluster:
        return print_findings(examine(config))
    from megatron_stare.debug.cluster import examine_cluster

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
