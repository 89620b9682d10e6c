"""Shares of other nodes: rank 0 decides over all of them, and has the outlines of their groups."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_stare.collect.shares import Holding
from megatron_stare.config import EngineError, UserError, override
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.loop.workers.links import Link
from megatron_stare.loop.workers.nodes import DistantNode, OwnNode
from megatron_stare.policy import topology as topologies
from megatron_stare.records import Group, Rollout
from tests.collect.test_shares import Patient, prompts, said, share_of
from tests.distributed import run_distributed
from tests.loop.workers.test_workers import journaled, served
from tests.rollout.sglang.fake_server import fake_servers
from tests.rollout.sglang.test_streaming import wait_until
from tests.small_run import rows_of, small_config

PATIENCE = 60


@contextlib.contextmanager
def two_nodes(engine: Patient) -> Iterator[tuple[DistantNode, OwnNode, Holding]]:
    """Rank 0's view of a node with one share, and that node."""
    ends, holding = socket.socketpair(), Holding()
    with share_of(engine) as share:
        own: Any = OwnNode(1, Link(ends[1]), [share], holding)
        distant = DistantNode(1, Link(ends[0]), 1)
        with contextlib.closing(own), contextlib.closing(distant):
            yield distant, own, holding


def test_a_group_of_another_node_is_known_in_outline_and_held_there():
    engine = Patient()
    with two_nodes(engine) as (node, _, holding):
        (share,) = node.shares
        judged, other = share.begin(prompts(4, 7))
        wait_until(lambda: len(engine.asked) == 4)
        for number, text in enumerate(("4", "5")):
            engine.finish((4, number), said(text))
        group = judged.result(PATIENCE)
        assert group.prompt.index == 4 and group.holder == 1 and group.prompt_length == 2
        assert all(not isinstance(each, Rollout) for each in group.rollouts)
        whole = holding.groups[4]
        assert [each.reward for each in group.rollouts] == [1.0, 0.0]
        assert [each.reward for each in whole.rollouts] == [1.0, 0.0]
        assert all(isinstance(each, Rollout) for each in whole.rollouts)
        share.halt().result(PATIENCE)
        assert not engine.asked and not other.done()
        share.advance(0)
        wait_until(lambda: len(engine.asked) == 2)
        assert engine.asked[7, 0][0].part is not None, "it goes on"
        engine.asked[7, 0][1].set_exception(UserError("too long"))
        with pytest.raises(UserError, match="too long"):
            other.result(PATIENCE)


def test_what_a_node_has_of_an_earlier_life_is_not_sampled_again():
    engine = Patient()
    with share_of(engine) as share:
        share.begin(prompts(7))
        engine.finish((7, 0), said("4"))
        share.halt().result(PATIENCE)
        known = share.known()
    engine = Patient()
    with two_nodes(engine) as (node, _, holding):
        holding.known |= known
        (group,) = node.shares[0].begin(prompts(7))
        wait_until(lambda: list(engine.asked) == [(7, 1)])
        engine.finish((7, 1), said("5"))
        assert [r.reward for r in group.result(PATIENCE).rollouts] == [1.0, 0.0]
        assert not holding.known


@pytest.mark.parametrize("by", ["stop", "loss"])
def test_whoever_waits_for_a_node_hears_that_it_will_not_come(by: str):
    engine = Patient()
    with two_nodes(engine) as (node, own, _):
        (group,) = node.shares[0].begin(prompts(3))
        wait_until(lambda: len(engine.asked) == 2)
        if by == "stop":
            node.shares[0].stop()
        else:
            own.close()
        with pytest.raises(EngineError, match="stopped" if by == "stop" else "rank 1"):
            group.result(PATIENCE)
        if by == "loss":
            with pytest.raises(EngineError, match="rank 1"):
                node.call(-1, "servers", None).result(PATIENCE)
            with pytest.raises(EngineError, match="rank 1"):
                node.shares[0].begin(prompts(5))[0].result(PATIENCE)


MODES = {
    "fully": ("rollout.asynchrony=fully_async", "rollout.max_staleness=2"),
    "tail": ("rollout.abort_long_tail=true", "rollout.over_sampling_batch_size=7"),
}


def streamed(rank: int, world_size: int, directory: str, urls: list[str]) -> dict[str, Any]:
    """Runs of two nodes: two steps, and four more of the run that goes on from there, with one node
    or with two; meanwhile a worker of the second node is killed.
    """
    multiprocessing.current_process().daemon = False  # it has workers
    found: dict[str, Any] = {}
    for mode, options in MODES.items():
        steps: list[Any] = []
        for nodes, total in ((2, 2), (1 if mode == "tail" else 2, 4), (2, 6)):
            os.environ["GROUP_RANK"] = str(rank if nodes == 2 else 0)
            own = (*options, "rollout.workers_per_node=1", f"train.num_rollout={total}")
            config = override(served(Path(directory), urls), [*own, f"run.dir={directory}/{mode}"])
            run = Trainer(config, topologies.start(config.policy))
            watch_steps(run, steps)
            killer = None
            if mode == "fully" and rank == 1 and total == 4:
                (share,) = run.collector.shares.own
                killer = threading.Thread(target=kill_at_work, args=(share, steps))
                killer.start()
            assert run.run(Interrupt())
            if killer is not None:
                killer.join()
                assert share.starts == 2, "it was started again"
            trained = {index for step in steps for index, *_ in step}
            assert not trained & run.collector.holding.groups.keys(), "they are let go"
        found[mode] = (steps, rows_of(config) if rank == 0 else [])
    return found


def kill_at_work(share: Any, steps: list[Any]) -> None:
    """End the worker while prompts are under way."""
    before = len(steps)
    wait_until(lambda: len(steps) > before and share.under_way)
    os.kill(share.process.pid, signal.SIGKILL)


def watch_steps(run: Trainer, steps: list[Any]) -> None:
    """Note of every step's groups the index, the holder, whether this rank has it whole, and the
    oldest version.
    """
    trained = run.learner.step

    def noted(groups: tuple[Group, ...], *others: Any) -> Any:
        whole = [isinstance(group.rollouts[0], Rollout) for group in groups]
        steps.append(
            [
                (group.prompt.index, group.holder, has, group.oldest_version)
                for group, has in zip(groups, whole, strict=True)
            ]
        )
        return trained(groups, *others)

    run.learner.step = functools.wraps(trained)(noted)  # type: ignore[method-assign]


@pytest.mark.slow
def test_streams_are_shared_by_nodes_and_go_on_with_another_number_of_them(tmp_path: Path):
    small_config(tmp_path)
    with fake_servers(2, shortest=8, longest=24) as urls:
        first, second = run_distributed(streamed, 2, str(tmp_path), list(urls))
    for mode in MODES:
        steps, rows = first[mode]
        assert [[each[:2] for each in step] for step in steps] == [
            [each[:2] for each in step] for step in second[mode][0]
        ]
        drawn = [index for step in steps for index, *_ in step]
        assert len(steps) == len(rows) == 6 and len(set(drawn)) == len(drawn) == 24
        for number, step in enumerate(steps):
            assert all(has == (holder == 0) for _, holder, has, _ in step)
            assert all(number - 2 <= oldest <= number for *_, oldest in step)
        for step in second[mode][0]:
            assert all(has == (holder == 1) for _, holder, has, _ in step)
        assert {holder for step in steps for _, holder, *_ in step} == {0, 1}
        assert all(row["staleness_max"] <= 2 for row in rows)
        keys = journaled(override(small_config(tmp_path), [f"run.dir={tmp_path}/{mode}"]))
        assert len(keys) == len(set(keys)), "no finished rollout was sampled again"
