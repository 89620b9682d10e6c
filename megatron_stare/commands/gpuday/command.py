"""The command `gpuday` and its options."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_stare.commands.arguments import OVERRIDES, argument, command
from megatron_stare.config import Config, UserError, override


@command(
    "gpuday",
    "accept a GPU machine: checks, speeds and short runs, as one report; resumable",
    OVERRIDES,
    argument("--list", action="store_true", help="print the stages with their planned minutes"),
    argument("--stages", default="", metavar="K0,K3", help="only these stages (all)"),
    argument("--budget", type=float, default=0.0, help="minutes; 0: no limit (0)"),
    argument("--output", type=Path, default=Path("runs/gpuday"), help="(runs/gpuday)"),
    argument("--model", default="", help="a Hugging Face directory; default: a random model"),
    argument("--gpus", type=int, default=-1, help="GPUs that the stages may use; default: all"),
    argument("--again", action="store_true", help="run stages again that have a result"),
    argument("--rehearse", action="store_true", help="tiny shapes, on any machine"),
    examples=("gpuday", "gpuday --stages K0,K3"),
)
def _gpuday(options: argparse.Namespace) -> int:
    from megatron_stare.commands.gpuday.gpuday import gpuday, listed, seen_gpus
    from megatron_stare.commands.gpuday.results import Day

    if options.list:
        print(listed())
        return 0
    override(Config(), options.overrides)  # unknown settings fail before the first stage
    seen = seen_gpus()
    if options.gpus > seen:
        raise UserError(f"--gpus {options.gpus} is more than the {seen} that torch sees")
    day = Day(
        directory=str(options.output.absolute()),
        gpus=seen if options.gpus < 0 else options.gpus,
        model=options.model and str(Path(options.model).absolute()),
        rehearsal=options.rehearse,
        overrides=tuple(options.overrides),
    )
    return gpuday(day, options.stages, options.budget, options.again)
