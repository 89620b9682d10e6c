"""The command line: python -m megatron_stare {train, bundle, compare, evaluate, parity, grade,
convert, quantize, serve, relay, plan, recipes, config, doctor, report, algorithms, completion}.

Exit codes: 0 done (or saved on SIGTERM / SIGUSR1), 1 a fault, 2 something only the user can put
right, in one line, 75 a hang that the watchdog ended, 130 interrupted by Ctrl-C with a checkpoint
to continue from.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from megatron_stare import config as configuration
from megatron_stare.commands.arguments import parse
from megatron_stare.config import Config, RunAlarm, UserError, check_arms, override
from megatron_stare.recipes import RECIPES, find_recipe

INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit code is its answer."""
    options = parse(arguments)
    _quiet()
    try:
        return _COMMANDS[options.command](options)
    except UserError as error:
        rank = os.environ.get("RANK", "0")
        print(
            f"error{'' if rank == '0' else f' [rank {rank}]'}: {error}", file=sys.stderr, flush=True
        )
        return 2
    except RunAlarm as error:
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


def _train(options: argparse.Namespace) -> int:
    if options.replay is not None:
        return _replay(options)
    if options.losses:
        raise UserError("--losses goes with --replay STEP; to train them: compare --losses")
    config = _config(options)
    if options.seeds:
        config = override(config, [f"compare.seeds=[{options.seeds}]"])
    check_arms(config, options.overrides)
    if options.dry_run:
        return _dry_run(options.source, config)
    if not options.force:
        _check_memory(config)
    from megatron_stare.compare.compare import compare
    from megatron_stare.loop.interrupt import Interrupt
    from megatron_stare.loop.trainer import Trainer
    from megatron_stare.loop.watchdog.watchdog import Watchdog
    from megatron_stare.policy import topology as topologies
    from megatron_stare.reporting.report import write_report

    with (
        Watchdog(config.run) as watchdog,
        topologies.session(config.policy, config.run.seed) as topology,
        watchdog.naming_failures(),
        Interrupt() as interrupt,
    ):
        if config.compare.arms:
            complete = compare(config, topology, interrupt, _own_command())
        else:
            complete = Trainer(config, topology, options.load).run(interrupt)
            if complete and topology.is_first:
                write_report([Path(config.run.dir)])
        if topology.is_first:
            _tell(config, complete)
    return INTERRUPTED if interrupt.noted == signal.SIGINT and not complete else 0


def _dry_run(source: str, config: Config) -> int:
    from megatron_stare.commands.dry_run import dry_run
    from megatron_stare.compare.compare import on_paper

    if os.environ.get("RANK", "0") != "0":
        return 0  # the first rank looks for all
    with tempfile.TemporaryDirectory() as place:
        faults = dry_run(source, config, on_paper(config, Path(place)))
    return 2 if faults else 0


def _replay(options: argparse.Namespace) -> int:
    if options.overrides:
        raise UserError(
            f"--replay takes a step as it was taken; remove {' '.join(options.overrides)}"
        )
    from megatron_stare.commands.replay import replay

    losses = options.losses.split(",") if options.losses else []
    return 0 if replay(Path(options.source), options.replay, losses) else 1


def _bundle(options: argparse.Namespace) -> int:
    from megatron_stare.commands.bundle import bundle

    target, size = bundle(options.run, options.step, options.output)
    print(f"written: {target}, {size / 2**20:.1f} MiB")
    return 0


def _check_memory(config: Config) -> None:
    """Refuse, on GPUs, what the plan says cannot fit, before servers or models are loaded."""
    import torch

    if torch.cuda.is_available():
        from megatron_stare.commands.plan import refuse_what_cannot_fit

        memory = torch.cuda.get_device_properties(0).total_memory
        world, local = (
            int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
        )
        refuse_what_cannot_fit(config, world, local, memory)


def _tell(config: Config, complete: bool) -> None:
    from megatron_stare.reporting.console import print_summary

    if not complete:
        print(f"stopped; `{_own_command()}` continues from the last checkpoint", file=sys.stderr)
        return
    print_summary(Path(config.run.dir))
    print(f"report: {Path(config.run.dir) / 'report.html'}")


def _compare(options: argparse.Namespace) -> int:
    config = _config(options)
    if options.source in RECIPES and config.run.dir == find_recipe(options.source).run.dir:
        config = override(config, [f"run.dir={config.run.dir}_losses"])
    if options.seeds:
        config = override(config, [f"compare.seeds=[{options.seeds}]"])
    from megatron_stare.compare.compare import between_losses, compare
    from megatron_stare.loop.interrupt import Interrupt
    from megatron_stare.policy import topology as topologies

    config = between_losses(config, options.losses.split(","))
    check_arms(config, options.overrides)
    with topologies.session(config.policy, config.run.seed) as topology, Interrupt() as interrupt:
        complete = compare(config, topology, interrupt, _own_command())
        if topology.is_first:
            _tell(config, complete)
    return INTERRUPTED if interrupt.noted == signal.SIGINT and not complete else 0


def _evaluate(options: argparse.Namespace) -> int:
    config = _config(options)
    from megatron_stare.loop.evaluate import evaluate_checkpoint
    from megatron_stare.loop.evaluation.evaluation import write_problems
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


def _parity(options: argparse.Namespace) -> int:
    config = _config(options)
    if options.prompts < 1:
        raise UserError(f"--prompts {options.prompts} must be 1 or more")
    from megatron_stare.commands.parity import parity
    from megatron_stare.policy import topology as topologies

    tokens = options.tokens or min(256, config.rollout.rollout_max_response_len)
    with topologies.session(config.policy, config.run.seed) as topology:
        return parity(config, topology, options.prompts, tokens)


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

    given = {each.name: getattr(options, each.name) for each in dataclasses.fields(QuantizeOptions)}
    quantize(QuantizeOptions(**given | {"overrides": tuple(options.overrides)}))
    return 0


def _serve(options: argparse.Namespace) -> int:
    config = _config(options)
    from megatron_stare.commands.servers.serve import serve
    from megatron_stare.loop.interrupt import Interrupt

    with Interrupt() as interrupt:
        serve(config, interrupt)
    return 0


def _mirror(options: argparse.Namespace) -> int:
    from megatron_stare.commands.servers.mirror import mirror
    from megatron_stare.loop.interrupt import Interrupt

    with Interrupt() as interrupt:
        mirror(options.directory, options.host, options.port, interrupt)
    return 0


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
        config = _config(options)  # what is wrong with it is told before the model's code is there
        from megatron_stare.commands.plan import planned

        text, fits = planned(
            options.source,
            config,
            gpus=options.gpus,
            rollout_gpus=options.rollout_gpus,
            response_tokens=options.response_tokens,
            cheapest=options.suggest,
        )
    print(text)
    return 0 if fits else 1


def _recipes(options: argparse.Namespace) -> int:
    from megatron_stare.commands.listings.recipes import text

    print(text())
    return 0


def _settings(options: argparse.Namespace) -> int:
    from megatron_stare.commands.listings import settings

    for target, write in ((options.page, settings.page), (options.schema, settings.schema)):
        if target:
            target.write_text(write(), encoding="utf-8")
            print(f"written: {target}")
            return 0
    if not options.source:
        raise UserError("config needs a recipe, a YAML file or a run directory")
    overrides, options.overrides = options.overrides, []
    base = _config(options)
    source = "recipe" if options.source in RECIPES else "config.yaml"
    print(settings.text(base, override(base, overrides), source, options.only))
    return 0


def _completion(options: argparse.Namespace) -> int:
    from megatron_stare.commands.arguments import command_parsers
    from megatron_stare.commands.listings.completion import script

    print(script(options.shell, command_parsers()), end="")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from megatron_stare.commands.doctor import examine, tell

    config = _config(options) if options.source else Config()
    if not options.cluster:
        return tell(examine(config))
    from megatron_stare.commands.cluster import examine_cluster

    return tell(examine_cluster(config))


def _report(options: argparse.Namespace) -> int:
    from megatron_stare.reporting.report import watch, write_report

    if options.watch:
        if options.output:
            raise UserError("--watch serves the page and writes none; leave out --output")
        watch(options.directories, options.port)
    else:
        print(f"report: {write_report(options.directories, options.output)}")
    return 0


def _algorithms(options: argparse.Namespace) -> int:
    if options.name:
        from megatron_stare.commands.listings.algorithms import page

        print(page(options.name))
    else:
        from megatron_stare.commands.listings.declarations import text

        print(text())
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


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
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
    "config": _settings,
    "doctor": _doctor,
    "report": _report,
    "algorithms": _algorithms,
    "completion": _completion,
}


if __name__ == "__main__":
    sys.exit(main())
