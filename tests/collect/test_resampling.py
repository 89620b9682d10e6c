"""Prompts of a batch that are sampled again: which, how, and which of their rollouts join it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_stare.collect.journal import Journal
from megatron_stare.collect.resampling import Aepo, Joined, Method, UecRl, is_replayed
from megatron_stare.collect.sampling_settings import Resampling, sampling_digest
from megatron_stare.config import Config, ResamplingConfig, UserError, override
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.prepare import target_of
from megatron_stare.loop.resolve import check_settings
from megatron_stare.loop.trainer import Trainer
from megatron_stare.losses import find_objective
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Group, Prompt, Rollout, TokenBatch
from megatron_stare.rollout.engine import Request
from tests.collect.attempts import measured_on_ranks
from tests.collect.test_rollout_buffer_stream import rows_of_a_stopped_run
from tests.collect.test_rollout_worker import PAIR, Patient, prompts, said, worker_of
from tests.distributed import run_distributed
from tests.small_run import rows_of, small_config

AEPO = "rollout.resampling.method=aepo"
# Of a small run: half of its four prompts, and an entropy on either side of which it comes to be.
SMALL = (AEPO, "rollout.resampling.prompt_share=0.5", "rollout.resampling.target_entropy=5")


ENDS = ("completed", "truncated", "completed", "truncated", "completed")


def row(advantage: float, name: int = 0, mask: bool = True, **fields: Any) -> Rollout:
    """One rollout, which its only token identifies."""
    return Rollout(
        (name,),
        (-0.5,),
        (mask,),
        status="completed",
        weight_version=3,
        advantage=advantage,
        **fields,
    )


def random_groups(random: numpy.random.Generator, first: int, count: int) -> list[Group]:
    made = []
    for index in range(first, first + count):
        names = random.integers(0, 1 << 30, random.integers(1, 6))
        masks = random.random(len(names)) < 0.8
        advantages = random.choice([-1.0, 0.0, 0.05, 0.06, 2.0], len(names))
        rows = map(row, advantages.tolist(), names.tolist(), masks.tolist())
        made.append(Group(Prompt(index, (1,), ""), tuple(rows)))
    return made


def flat(groups: Sequence[Group]) -> list[tuple[int, Rollout]]:
    return [(group.prompt.index, rollout) for group in groups for rollout in group.rollouts]


@pytest.mark.parametrize("surprisal", [0.0, 0.5, 0.500001])
@pytest.mark.parametrize("most", [1, 3, 60])
def test_aepo_resamples_by_its_rule(surprisal: float, most: int) -> None:
    """Row by row: the first k of the fresh ones that may join, then the others from the k-th on."""
    random = numpy.random.default_rng(most)
    method = Aepo(dataclasses.replace(ResamplingConfig(), max_rollouts=most), 5)
    cool, counts = surprisal > 0.5, set()
    for size in (1, 2, 4, 7, 8, 9):
        groups, fresh = random_groups(random, 0, size), random_groups(random, 50, size)
        indices, again = method.asks(groups, surprisal)
        assert indices == list(range(math.ceil(size / 4)))
        assert again == Resampling(5, 0.8 if cool else 1.2)
        may = [(i, r) for i, r in flat(fresh) if (r.advantage or 0) > 0.05 and r.loss_tokens]
        count = min(most, len(may))
        count = count // 2 if cool else count
        joined = [(i, dataclasses.replace(r, advantage=1.0)) for i, r in may[:count]]
        found, metrics = method.joined(groups, fresh, surprisal)
        assert flat(found) == joined + flat(groups)[count:]
        assert all(group.rollouts for group in found)
        assert metrics["resampled_above"] == len(may) and metrics["resampled_trained"] == count
        counts.add(count)
    assert len(counts) > 1 or most == 1


def test_a_batch_that_nothing_may_join_is_unchanged() -> None:
    groups = [Group(Prompt(0, (1,), ""), (row(1.0), row(-1.0)))]
    fresh = [Group(Prompt(0, (1,), ""), (row(0.0, reward=0.0), row(0.0, reward=1.0)))]
    found, metrics = Aepo(ResamplingConfig(), 2).joined(groups, fresh, 0.1)
    assert list(found) == groups and metrics["resampled_trained"] == 0
    assert metrics["resampled_reward"] == 0.5


@pytest.mark.parametrize("negative", [False, True])
def test_uec_rl_resamples_by_its_rule(negative: bool) -> None:
    """Row by row; and the rollouts that are buffered."""
    random, trained, kept = numpy.random.default_rng(1), 0, 0
    settings = dataclasses.replace(ResamplingConfig(), replay_negative=negative)
    method = UecRl(settings)
    for _ in range(20):
        verdicts = random.choice(["wrong", "wrong", "correct", "unverifiable"], (5, 2)).tolist()
        groups = [
            Group(
                Prompt(index, (1,), ""),
                tuple(
                    dataclasses.replace(r, verdict=verdicts[index][n % 2], status=ENDS[n])
                    for n, r in enumerate(group.rollouts)
                ),
            )
            for index, group in enumerate(random_groups(random, 0, 5))
        ]
        indices, again = method.asks(groups, 0.0)
        assert again == Resampling(20, 1.1)
        assert indices == [
            group.prompt.index
            for group in groups
            if {rollout.verdict for rollout in group.rollouts} == {"wrong"}
        ]
        fresh = random_groups(random, 50, 3)
        found, metrics = method.joined(groups, fresh, 0.0)
        expected = [(i, r) for i, r in flat(fresh) if abs(r.advantage) > 0.5 and r.loss_tokens]
        assert metrics["resampled_trained"] == len(expected)
        assert metrics["resampled_prompts"] == 3
        for index, r in flat(groups):
            endless = r.advantage > 0 and r.status == "truncated"
            if abs(r.advantage) > 0.05 and r.loss_tokens and not endless:
                expected.append((index, r))
        assert flat(found) == expected and all(group.rollouts for group in found)
        trained += len(expected)
        for _, r in expected:
            size = abs(r.advantage) if negative else r.advantage
            assert is_replayed(settings, r) == (size > 1)
            kept += size > 1
    assert is_replayed(settings, row(-1.5)) == negative
    assert not is_replayed(settings, row(2.0, mask=False))
    assert trained > 50 and kept > 10


class Warm(Patient):
    """Notes also the temperature of each request."""

    def __init__(self) -> None:
        super().__init__()
        self.warm: dict[tuple[int, ...], float] = {}

    def submit(self, requests: Sequence[Request], params: Any) -> list[Future[Rollout]]:
        self.warm |= {request.seed[2:]: params.temperature for request in requests}
        return super().submit(requests, params)


@pytest.mark.parametrize("temperature", [1.2, 1.0])
def test_resampled_rollouts_have_their_own_seeds_and_temperature(temperature: float) -> None:
    engine = Warm()
    with worker_of(engine) as worker:
        (first,) = worker.start(prompts(3))
        for number in (0, 1):
            engine.finish((3, number), said("4"))
        assert [r.temperature for r in first.result(timeout=120).rollouts] == [None] * 2
        (again,) = worker.start(prompts(3), resampling=Resampling(3, temperature))
        for number, text in ((4, "4"), (2, "wrong"), (3, "4")):
            engine.finish((3, number), said(text))
        rollouts = again.result(timeout=120).rollouts
    assert engine.warm == dict.fromkeys([(3, 0), (3, 1)], 1.0) | dict.fromkeys(
        [(3, 2), (3, 3), (3, 4)], temperature
    )
    assert [rollout.reward for rollout in rollouts] == [0.0, 1.0, 1.0]
    other = None if temperature == 1.0 else temperature
    assert [rollout.temperature for rollout in rollouts] == [other] * 3


def test_rollouts_of_a_journal_need_the_same_temperature_and_weights(
    tmp_path: Path,
) -> None:
    """Rollouts of lost weights, which max_staleness would allow, have no ratio at another one."""
    options = ("rollout.max_staleness=1",)
    digest = sampling_digest(override(Config(), [*PAIR, *options]))
    journal = Journal(tmp_path)
    journal.open(0)
    for number, temperature, version in ((2, 1.2, 0), (3, 0.8, 0), (4, None, 0), (5, 1.2, -1)):
        rollout = dataclasses.replace(
            said("4", version=version), temperature=temperature, sampling=digest
        )
        journal.write((3, number), rollout)
    journal.close()
    engine = Warm()
    with worker_of(engine, *options, journal=Journal(tmp_path)) as worker:
        worker.start(prompts(3), resampling=Resampling(4, 1.2))
        assert list(engine.warm) == [(3, 3), (3, 4), (3, 5)]
        worker.stop()


def seen_batches(run: Trainer) -> Iterator[tuple[TokenBatch, bool]]:
    """The batch of each update, and whether it is the first of a step."""
    found, update = [], run.actor.update
    per_step = run.config.train.epochs

    def noted(batch: TokenBatch, *others: Any) -> Any:
        found.append((batch, len(found) % per_step == 0))
        return update(batch, *others)

    run.actor.update = noted  # type: ignore[method-assign]
    assert run.run(Interrupt())
    yield from found


def test_the_ratio_of_resampled_rollouts_starts_at_the_trainers_scores(
    tmp_path: Path, topology: Topology
) -> None:
    """In a batch with stale rollouts, whose ratio starts at the engine's."""
    stale = ("rollout.max_staleness=1", "rollout.over_sampling_batch_size=6")
    run = Trainer(small_config(tmp_path, *SMALL, *stale, "train.epochs=2"), topology)
    tempered, others = 0, 0
    for batch, first in seen_batches(run):
        assert batch.off_temperature_T is not None and batch.old_surprisal_T is not None
        assert batch.fresh_T[batch.off_temperature_T].all()
        others += int((~batch.fresh_T).sum())
        if first:
            own_T = batch.fresh_T | batch.off_temperature_T
            assert torch.equal(batch.old_surprisal_T[own_T], batch.surprisal_T[own_T])
            apart_T = (batch.old_surprisal_T + batch.rollout_logprob_T).abs()[
                batch.off_temperature_T
            ]
            assert apart_T.max() > 0.01, "the engine's are of another distribution"
            tempered += len(apart_T)
    assert tempered and others
    assert all(row["logprob_diff_max"] < 1e-4 for row in rows_of(run.config))


def test_a_run_follows_the_last_steps_surprisal(tmp_path: Path, topology: Topology) -> None:
    """T, who joins, and their log-probs: those of the weights that sampled them, at T."""
    run = Trainer(small_config(tmp_path, *SMALL, "train.num_rollout=6"), topology)
    step, trained, weights = run.learner.step, [], []

    def noted(groups: Sequence[Group], *others: Any) -> Any:
        trained.append(groups)
        model = {k: v.clone() for k, v in run.engine.model.state_dict().items()}  # type: ignore[attr-defined]
        weights.append(model)
        return step(groups, *others)

    run.learner.step = noted  # type: ignore[method-assign]
    assert run.run(Interrupt())
    rows = rows_of(run.config)
    before = [0.0, *(row["surprisal"] for row in rows)]
    expected = [1.2 if value <= 5 else 0.8 for value in before[:-1]]
    assert [row["resampling_temperature"] for row in rows] == expected
    assert set(expected) == {0.8, 1.2}
    assert all(row["rollout_diff_max"] < 1e-4 for row in rows)
    model = AutoModelForCausalLM.from_pretrained(run.config.policy.hf_checkpoint)
    for row, groups, state, temperature in zip(rows, trained, weights, expected, strict=True):
        model.load_state_dict(state)
        joined = [pair for pair in flat_with_prompts(groups) if pair[1].temperature is not None]
        assert len(joined) == row["resampled_trained"] and row["sequences"] == 16
        for prompt, rollout in joined:
            assert (rollout.temperature, rollout.advantage, rollout.reward) == (temperature, 1, 1)
            ids = torch.tensor([*prompt.token_ids.tolist(), *rollout.response_ids.tolist()])
            logits = model(ids[None]).logits[0, len(prompt.token_ids) - 1 : -1]
            logprobs = torch.log_softmax(logits.float() / temperature, -1)
            scores = logprobs.gather(-1, ids[len(prompt.token_ids) :, None])[:, 0]
            torch.testing.assert_close(
                scores.detach(), torch.tensor(rollout.logprobs), rtol=0, atol=1e-4
            )
    assert any(row["resampled_trained"] for row in rows)


def flat_with_prompts(groups: Sequence[Group]) -> list[tuple[Prompt, Rollout]]:
    return [(group.prompt, rollout) for group in groups for rollout in group.rollouts]  # type: ignore[misc]


def test_a_batch_without_signal_learns_from_what_joins_it(
    tmp_path: Path, topology: Topology
) -> None:
    run = Trainer(small_config(tmp_path, *SMALL, "train.num_rollout=1"), topology)
    joined = run.collector._joined

    def without(method: Method, groups: Sequence[Group]) -> Joined:
        flat = [
            dataclasses.replace(
                group, rollouts=tuple(dataclasses.replace(r, advantage=0.0) for r in group.rollouts)
            )
            for group in groups
        ]
        return joined(method, flat)

    run.collector._joined = without  # type: ignore[method-assign]
    assert run.run(Interrupt())
    (row,) = rows_of(run.config)
    assert row["skipped"] == 0 and row["resampled_trained"] > 0 and row["grad_norm"] > 0


def test_a_stopped_run_repeats_an_uninterrupted_one(tmp_path: Path, topology: Topology) -> None:
    """A checkpoint has the surprisal that the next temperature depends on."""
    rows = rows_of_a_stopped_run(tmp_path, topology, 2, *SMALL)
    assert rows[1]["surprisal"] > 5 and rows[2]["resampling_temperature"] == 0.8, "0 would be 1.2"


@pytest.mark.slow
def test_ranks_share_rollouts_and_resume_bit_for_bit(tmp_path: Path, topology: Topology) -> None:
    config = small_config(tmp_path, *SMALL, "train.num_rollout=4")
    assert Trainer(config, topology).run(Interrupt())
    alone = rows_of(config)
    (one, resumed), (other, _) = run_distributed(measured_on_ranks, 2, str(tmp_path), SMALL, 4)
    assert one == other == resumed and len(one) == 4
    keys = ("loss", "entropy", "surprisal", "grad_norm", "rollout_diff_max")
    for row, expected in zip(one, alone, strict=True):
        exact = {key for key in row if key.startswith("resampl")} | {"sequences", "loss_tokens"}
        assert len(exact) == 6
        assert {key: row[key] for key in exact} == {key: expected[key] for key in exact}
        for key in keys:
            assert row[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-5), key


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("loss.name=dapo",), None),
        (("loss.name=dapo", AEPO), 0.5),
        (("loss.target_entropy=0.3", AEPO), 0.3),
    ],
)
def test_alarms_look_at_the_target_of_the_loss_else_at_the_methods(
    options: tuple[str, ...], expected: float | None
) -> None:
    config = override(Config(), list(options))
    assert target_of(config, find_objective(config.loss.name)) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("rollout.asynchrony=one_step_off",), r"asynchrony=one_step_off samples ahead"),
        (("rollout.asynchrony=fully_async",), r"asynchrony=fully_async samples ahead"),
        (
            ("rollout.long_tail=continue", "rollout.over_sampling_batch_size=99"),
            r"rollout\.long_tail=continue samples ahead",
        ),
        (("scoring.advantage=remax",), r"scoring\.advantage=remax with .* set scoring\.advantage="),
        (
            ("rollout.n_samples_per_prompt=1", "rollout.dynamic_sampling=false"),
            r"rollout\.n_samples_per_prompt=1 does not",
        ),
        (("mismatch.old_policy=rollout",), r"mismatch\.old_policy=rollout starts ratios there"),
        (("loss.name=dppo",), r"loss\.name=dppo compares the policy with the engine's"),
    ],
)
@pytest.mark.parametrize("method", ["aepo", "uec_rl"])
def test_unsupported_combinations_of_resampling_are_refused(
    method: str, options: tuple[str, ...], message: str
) -> None:
    config = override(Config(), list(options))
    check_settings(config, 1 << 20)
    with pytest.raises(UserError, match=rf"rollout\.resampling\.method={method} .*{message}"):
        check_settings(override(config, [f"rollout.resampling.method={method}"]), 1 << 20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), r"rollout\.dynamic_sampling=true drops whole groups; set .*=false"),
        (
            ("rollout.dynamic_sampling=false", "rollout.max_staleness=1"),
            r"rollout\.max_staleness=1 drops; set it to 2 or more",
        ),
    ],
)
def test_buffered_rollouts_need_settings_that_admit_them(
    options: tuple[str, ...], message: str
) -> None:
    config = override(Config(), [*options, "rollout.resampling.method=uec_rl"])
    with pytest.raises(UserError, match=message):
        check_settings(config, 1 << 20)
