"""The metrics of runs on several ranks, whole and stopped in the middle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy import topology as topologies
from tests.small_run import small_config


def measured_on_ranks(
    rank: int, world_size: int, directory: str, options: tuple[str, ...], steps: int
) -> list[list[dict[str, float]]]:
    """The metrics of each step on this rank: of a whole run, and of one that stops half way and
    resumes.
    """
    found = []
    for name, stops in (("whole", (steps,)), ("parts", (steps // 2, steps))):
        seen: list[dict[str, float]] = []
        for stop in stops:
            more = (f"train.num_rollout={stop}", f"run.dir={directory}/{name}")
            config = small_config(Path(directory), *options, *more)
            run = Trainer(config, topologies.start(config.policy))
            step = run.train_step

            def noting(step: Any = step, seen: Any = seen) -> Any:
                seen.append(step())
                return seen[-1]

            run.train_step = noting  # type: ignore[method-assign]
            assert run.run(Interrupt())
        found.append([{k: v for k, v in each.items() if "seconds" not in k} for each in seen])
    return found
