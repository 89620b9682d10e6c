"""A batch whose rollouts lie on different ranks is packed as if every rank had all of them, and no
rank sends or holds more of it than it must.
"""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

from megatron_stare.collect.batch import Collected, metrics_of
from megatron_stare.collect.rounds import all_gather_groups, group_state, groups_of, scatter_groups
from megatron_stare.config import Config, override
from megatron_stare.numerics import exchange
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.checkpoints.actor_state import ShardedBytes
from megatron_stare.policy.layout import FLAT
from megatron_stare.policy.packing import pack
from megatron_stare.records import Group, Prompt, Rollout
from megatron_stare.scoring.advantages import PromptHistory, with_advantages
from tests.distributed import run_distributed

WORLD, BUCKET, HIDDEN = 4, 1000, 16
TP, PP, CP = (
    f"policy.{name}_parallel_size=2" for name in ("tensor_model", "pipeline_model", "context")
)
# DCPO remembers the rewards of each prompt.
LAYOUTS = {"DP4": ("scoring.advantage=dcpo",), "TP2": (TP,), "CP2": (CP, TP), "PP2": (PP,)}
# Which rank holds group n: in turn, all on rank 0, or on the last two.
HOLDERS = {"in turn": lambda n: n % 4, "rank 0": lambda n: 0, "the last": lambda n: 2 + n % 2}


def groups() -> list[Group]:
    """Groups of 1 to 300 tokens: without loss token, of several versions, without reward, with and
    without episodes.
    """
    random, made = numpy.random.default_rng(0), []
    for index in range(11):
        rollouts = []
        for number in range(3):
            count = int(random.integers(1, 300 if number else 5))
            lengths = (1 + count // 5, count - 1 - count // 5) if number == 2 and count > 2 else ()
            mask = random.random(count) < (0.7 if index else 0.0)
            mask[[0, lengths[0]] if lengths else []] = False
            rollouts.append(
                Rollout(
                    random.integers(0, 1 << 17, count),
                    -random.random(count).astype(numpy.float32),
                    mask,
                    lengths=lengths,
                    status=("completed", "truncated")[number % 2],
                    weight_version=3,
                    text="\u00e9" * count,
                    reward=None if index == 4 else float(random.integers(0, 2)) / 3,
                    baseline=index / 8 if index % 3 else None,
                    temperature=1.2 if index % 4 == 1 else None,
                    token_versions=random.integers(1, 4, count) if index % 2 else (),
                    episode={"turns": 1.0} if index % 3 else {},
                    verdict="unverifiable" if index == 4 else "wrong",
                    reward_parts={"format": 0.1},
                )
            )
        prompt = Prompt(100 + index, random.integers(0, 1 << 17, 1 + index), "label", text="t")
        made.append(Group(prompt, tuple(rollouts)))
    return made


class Traffic:
    """Counts what passes between ranks, in bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent, self.received, self.largest = 0, 0, 0
        isend, recv = dist.isend, dist.recv

        def sending(tensor: torch.Tensor, *rest: Any) -> Any:
            self.sent += tensor.nbytes
            self.largest = max(self.largest, tensor.nbytes)
            return isend(tensor, *rest)

        def receiving(tensor: torch.Tensor, *rest: Any) -> Any:
            self.received += tensor.nbytes
            return recv(tensor, *rest)

        monkeypatch.setattr(dist, "isend", sending)
        monkeypatch.setattr(dist, "recv", receiving)


def same_batch(one: Any, other: Any) -> bool:
    micros = zip(one.microbatches, other.microbatches, strict=True)
    rewards = numpy.array_equal(one.reward_Q, other.reward_Q, equal_nan=True)
    return (
        rewards
        and torch.equal(one.group_Q, other.group_Q)
        and all(torch.equal(getattr(one, n), getattr(other, n)) for n in FLAT)
        and all(
            torch.equal(a.token_BS, b.token_BS)
            and torch.equal(a.row_N, b.row_N)
            and torch.equal(a.target_N, b.target_N)
            for a, b in micros
        )
    )


def batch_of(known: list[Group], config: Config) -> Collected:
    made = with_advantages(known, config.scoring, PromptHistory())
    return Collected(tuple(made), True, metrics_of(known, known, {}, config))


def everything(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    exchange.BUCKET_BYTES = BUCKET
    whole = groups()
    for layout, options in LAYOUTS.items():
        config = override(Config(), ["policy.max_tokens_per_gpu=700", *options])
        topology = topologies.start(config.policy)
        alone = batch_of(whole, config)
        of_all = pack(alone.groups, topology, config.policy, hidden_size=HIDDEN, weight_version=3)
        for name, holder in HOLDERS.items():
            own = [group for n, group in enumerate(whole) if holder(n) == rank]
            parts = [iter(part) for part in all_gather_groups(own, topology)]
            known = [next(parts[holder(n)]) for n in range(len(whole))]
            collected = batch_of(known, config)
            with pytest.MonkeyPatch.context() as patch:
                traffic = Traffic(patch)
                batch = pack(
                    collected.groups,
                    topology,
                    config.policy,
                    hidden_size=HIDDEN,
                    weight_version=3,
                )
            outlined = [g for g in known if not isinstance(g.rollouts[0], Rollout)]
            part = group_state(collected.groups, topology)
            assert isinstance(part, ShardedBytes)
            parts = topology.gather((part.begin, part.size, part.part))
            saved = groups_of(torch.cat([bytes_ for _, _, bytes_ in parts]))
            ends = numpy.cumsum([len(bytes_) for _, _, bytes_ in parts])
            again = scatter_groups(saved, topology)
            found[f"{layout}, {name}"] = {
                "same": same_batch(batch, of_all),
                "metrics": collected.metrics == alone.metrics,
                "own": len(known) - len(outlined) == len(own),
                "saved": saved == list(alone.groups),
                "spread": [(begin + len(bytes_), size) for begin, size, bytes_ in parts]
                == [(end, ends[-1]) for end in ends],
                "own part": groups_of(part.part)
                == [alone.groups[n] for n in range(len(whole)) if holder(n) == rank],
                "assigned": [g.holder for g in again] == [n % 4 for n in range(len(whole))],
                "traffic": (traffic.sent, traffic.received, traffic.largest),
                "held": sum(size_of(group) for group in own),
                "share": sum(
                    size_of(group, int(n) % 3)
                    for group, n in (
                        (whole[int(n) // 3], n) for n in batch.sequence_T.unique().tolist()
                    )
                ),
                "ranks of a part": len(
                    topology.ranks_of_tokens(topology.data_rank, topology.context_rank)
                ),
                "parts": topology.context_size,
            }
    return found


def size_of(group: Group, *numbers: int) -> int:
    """Bytes of a group's sequences, or of some of them."""
    rollouts = [group.rollouts[n] for n in numbers or range(len(group.rollouts))]
    return sum(
        4 * group.prompt_length + (9 + 4 * rollout.varied) * rollout.length for rollout in rollouts
    )


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, dict[str, Any]]]:
    return run_distributed(everything, WORLD)


CASES = [f"{layout}, {name}" for layout in LAYOUTS for name in HOLDERS]


@pytest.mark.parametrize("case", CASES)
def test_the_batch_is_the_one_of_ranks_that_have_everything(case: str, ranks: Any):
    for rank in ranks:
        found = rank[case]
        assert found["own"] and found["metrics"] and found["same"]
        assert found["saved"] and found["spread"] and found["own part"] and found["assigned"]


@pytest.mark.parametrize("case", CASES)
def test_a_rank_sends_and_receives_only_its_part(case: str, ranks: Any):
    """A rank sends its rollouts once at most; it receives the rollouts that it trains on once and
    passes them on once. Sequences without a loss token are 3 of 33.
    """
    total = sum(rank[case]["held"] for rank in ranks)
    for rank in ranks:
        sent, received, largest = rank[case]["traffic"]
        assert 0 < largest <= BUCKET or not sent
        slack, share = total / 10, rank[case]["share"] / rank[case]["parts"]
        assert received <= share + slack
        assert sent <= rank[case]["held"] + (rank[case]["ranks of a part"] > 1) * (share + slack)
    assert sum(rank[case]["traffic"][0] for rank in ranks) == sum(
        rank[case]["traffic"][1] for rank in ranks
    )
