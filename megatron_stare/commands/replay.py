"""`train RUN --replay STEP`: repeats a recorded step, bit by bit or under other objectives."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_stare.config import Config, UserError
from megatron_stare.debug.objectives import Asked, compare_objectives
from megatron_stare.debug.replay import Compared, Replay
from megatron_stare.loop.recording.heads import read_config, read_head, records_directory
from megatron_stare.policy import topology as topologies

# The figures that a reader looks for first. The replay compares all figures.
_SHOWN = ("loss", "grad_norm", "entropy", "chosen_positive", "chosen_negative", "weight_w")


def replay(run: Path, step: int, losses: list[str]) -> bool:
    """Print whether the step, and those between the checkpoint and the step, came out the same, and
    return it. UserError: the step cannot be replayed here.
    """
    config = _config(run, step)
    console = Console()
    with topologies.session(config.policy, config.run.seed) as topology:
        again = Replay(run, step, topology)
        say = functools.partial(console.print, soft_wrap=True) if topology.is_first else _nothing
        origin = f"checkpoint {again.start}" if again.start else "the run's first weights"
        say(f"step {step} of {run}, from {origin}, on {topology.world_size} ranks")
        identical = True
        for compared in again.before() if losses else again.steps():
            say(_line(compared))
            if compared.step == step:
                say(_figures(compared))
            identical = identical and compared.identical
        if losses:
            say(_objectives(compare_objectives(again, losses)))
    return identical


def _nothing(*_: Any) -> None:
    """The output of all ranks but the first: none."""


def _config(run: Path, step: int) -> Config:
    if not run.is_dir():
        raise UserError(f"--replay takes a run directory, and {run} is none")
    records = records_directory(run)
    return read_config(records, read_head(records, step))


def _line(compared: Compared) -> str:
    if compared.identical and any(compared.noise):
        within = f"{compared.noise[0]:.0%} (policy.deterministic=true on a GPU gives the same bits)"
        return f"step {compared.step}: {len(compared.replayed)} figures agree within {within}"
    if compared.identical:
        return f"step {compared.step}: weights and {len(compared.replayed)} figures identical"
    before, now = compared.weights
    if before != now and not any(compared.noise):
        return f"step {compared.step}: begins with weights {now}, and was taken from {before}"
    names = compared.differing
    return f"step {compared.step}: {len(names)} figures differ: {', '.join(names)}"


def _figures(compared: Compared) -> Table:
    table = Table("figure", "recorded", "replayed", "")
    rows = [name for name in _SHOWN if name in compared.replayed]
    rows += [name for name in compared.differing if name not in rows]
    for name in rows:
        recorded, replayed = compared.recorded.get(name), compared.replayed[name]
        same = "differs" if name in compared.differing else "same bits"
        table.add_row(name, repr(recorded), repr(replayed), same)
    return table


def _objectives(many: list[Asked]) -> Table:
    first = many[0].name
    table = Table(
        "objective", "sum |dL/ds|", f"tokens other than {first}", "the first of them", "asked there"
    )
    for asked in many:
        share = f"{asked.differing} of {asked.tokens}"
        where, values = "", ""
        if asked.first is not None:
            found = asked.first
            where = f"{found.rollout}, token {found.position} (id {found.token})"
            values = f"{found.asked[1]:.6g} ({first}: {found.asked[0]:.6g})"
        table.add_row(asked.name, f"{asked.total:.6g}", share, where, values)
    return table
