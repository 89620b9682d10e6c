"""Batches out of a queue of rollouts, and batches of rollouts that were trained before."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_stare.config import NoSignalError, override
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Group, Prompt, Rollout, TokenBatch
from tests.collect.attempts import measured_on_ranks
from tests.collect.test_rollout_buffer_stream import rows_of_a_stopped_run
from tests.distributed import run_distributed
from tests.small_run import rows_of, small_config

UEC = (
    "rollout.resampling.method=uec_rl",
    "rollout.dynamic_sampling=false",
    "rollout.max_staleness=2",
    # A tiny model never ends by itself, so that only wrong rollouts are trained and buffered.
    "rollout.resampling.replay_negative=true",
    "rollout.resampling.replay_advantage=0.6",
    "rollout.resampling.replay_interval=2",
    "rollout.resampling.samples=6",
)
FULL, OFTEN = 16, 1


def flat(groups: Sequence[Group]) -> list[tuple[Prompt, Rollout]]:
    return [(group.prompt, rollout) for group in groups for rollout in group.rollouts]  # type: ignore[misc]


def names(pairs: Sequence[tuple[Prompt, Rollout]]) -> list[tuple[int, bytes]]:
    """The identity of each rollout."""
    return [(prompt.index, rollout.response_ids.tobytes()) for prompt, rollout in pairs]


class Noted:
    """A run with what each of its steps trained, under which weights, and what joined the queue."""

    def __init__(self, run: Trainer) -> None:
        self.run = run
        self.trained: list[list[tuple[Prompt, Rollout]]] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        self.batches: list[TokenBatch] = []  # as the first update of each step has them
        self.queued: list[tuple[Prompt, Rollout]] = []
        step, joined, update = run.learner.step, run.collector._joined, run.actor.update  # type: ignore[attr-defined]

        def stepping(groups: Sequence[Group], *others: Any) -> Any:
            self.trained.append(flat(groups))
            model = run.engine.model.state_dict()  # type: ignore[attr-defined]
            self.weights.append({name: value.clone() for name, value in model.items()})
            return step(groups, *others)

        def joining(*arguments: Any) -> Any:
            found = joined(*arguments)
            self.queued += flat(found.groups)
            return found

        def updating(batch: TokenBatch, *others: Any) -> Any:
            if len(self.batches) < len(self.trained):
                self.batches.append(batch)
            return update(batch, *others)

        run.learner.step = stepping  # type: ignore[method-assign]
        run.collector._joined = joining  # type: ignore[attr-defined]
        run.actor.update = updating  # type: ignore[method-assign]
        assert run.run(Interrupt())
        self.rows = rows_of(run.config)


@pytest.fixture(scope="module")
def noted(tmp_path_factory: pytest.TempPathFactory) -> Noted:
    directory = tmp_path_factory.mktemp("queued")
    often = f"rollout.resampling.replay_interval={OFTEN}"
    config = small_config(directory, *UEC, often, "train.num_rollout=12", "train.epochs=2")
    with topologies.session(config.policy) as topology:
        return Noted(Trainer(config, topology))


def turns(noted: Noted) -> list[bool]:
    return ["replayed_rollouts" in row for row in noted.rows]


def test_batches_are_full_and_nothing_is_lost_or_trained_twice(noted: Noted) -> None:
    own = [pairs for pairs, turn in zip(noted.trained, turns(noted), strict=True) if not turn]
    assert [len(pairs) for pairs in own] == [FULL] * len(own)
    together = [pair for pairs in own for pair in pairs]
    assert names(together) == names(noted.queued)[: len(together)]
    assert len(noted.queued) - len(together) == noted.rows[-1].get(
        "buffered_rollouts", noted.rows[-2].get("buffered_rollouts")
    )
    temperatures = {rollout.temperature for _, rollout in together}
    assert temperatures == {None, 1.1}, "both kinds"


def test_the_newest_groups_are_buffered_and_used_in_turn(noted: Noted) -> None:
    """The rule again, with lists."""
    buffered: list[tuple[int, bytes]] = []
    count = replayed = 0
    sizes = set()
    for pairs, turn in zip(noted.trained, turns(noted), strict=True):
        due = count % OFTEN == 0 and count != replayed and len(buffered) >= FULL
        assert turn == due
        if due:
            sizes.add(len(pairs))
            assert len(pairs) == len(buffered) // FULL * FULL
            if len(pairs) == 2 * FULL:
                assert names(pairs) == buffered
            else:
                assert set(names(pairs)) <= set(buffered) and len(set(names(pairs))) == FULL
            replayed = count
        else:
            count += 1
            buffered = (buffered + names([p for p in pairs if abs(p[1].advantage) > 0.6]))[
                -2 * FULL :
            ]
    assert sizes == {FULL, 2 * FULL}


def test_buffered_rollouts_keep_their_first_log_probs(noted: Noted) -> None:
    """They are of the weights of that step at the policy's temperature, under any sampling."""
    model = AutoModelForCausalLM.from_pretrained(noted.run.config.policy.hf_checkpoint)
    first: dict[tuple[int, bytes], int] = {}
    seen, tempered = 0, 0
    for step, (pairs, turn) in enumerate(zip(noted.trained, turns(noted), strict=True)):
        batch = noted.batches[step]
        assert batch.old_surprisal_T is not None and batch.scored_T is not None
        assert batch.scored_T.all() if turn else not batch.scored_T.any()
        if turn:
            assert torch.equal(batch.old_surprisal_T, -batch.rollout_logprob_T)
        else:
            own_T = batch.fresh_T | batch.off_temperature_T
            assert torch.equal(batch.old_surprisal_T[own_T], batch.surprisal_T[own_T])
        for (prompt, rollout), name in zip(pairs, names(pairs), strict=True):
            if not turn:
                first[name] = step
                tempered += rollout.temperature is not None
                continue
            model.load_state_dict(noted.weights[first[name]])
            ids = torch.tensor([*prompt.token_ids.tolist(), *rollout.response_ids.tolist()])
            logits = model(ids[None]).logits[0, len(prompt.token_ids) - 1 : -1]
            scores = torch.log_softmax(logits.float(), -1)
            scores = scores.gather(-1, ids[len(prompt.token_ids) :, None])[:, 0].detach().numpy()
            stale = rollout.weight_version < first[name]
            sampled = noted_logprobs(noted, first[name], name)
            if stale and sampled is not None:  # its ratio started where it was sampled
                assert numpy.allclose(rollout.logprobs, sampled, atol=1e-6)
            else:
                assert numpy.allclose(rollout.logprobs, scores, atol=1e-4)
            assert rollout.temperature is None
            seen += 1
    assert seen > FULL and tempered


def noted_logprobs(noted: Noted, step: int, name: tuple[int, bytes]) -> numpy.ndarray | None:
    """The engine's, of a rollout at the policy's own temperature."""
    pairs = noted.trained[step]
    rollout = pairs[names(pairs).index(name)][1]
    return rollout.logprobs if rollout.temperature is None else None


def test_buffered_rollouts_are_in_no_metric_of_the_engine(noted: Noted) -> None:
    for row, turn in zip(noted.rows, turns(noted), strict=True):
        assert row.get("logprob_diff_max", 0) < 1e-4
        assert turn == ("reward" not in row and "rollout_diff_mean" not in row)


@pytest.mark.parametrize("half", [3, 4])
def test_a_stopped_run_repeats_an_uninterrupted_one(
    half: int, tmp_path: Path, topology: Topology
) -> None:
    """A checkpoint has the queue, the buffered rollouts, and the kind of the next step: the third
    step trains buffered rollouts.
    """
    rows = rows_of_a_stopped_run(tmp_path, topology, half, *UEC)
    assert ["replayed_rollouts" in row for row in rows[:4]] == [False, False, True, False]
    assert rows[3]["buffered_rollouts"] > 0 and rows[3]["replay_buffer_rollouts"] > 0
    assert half == 3 or any("replayed_rollouts" in row for row in rows[4:])


def test_no_round_is_in_flight_when_new_weights_arrive(tmp_path: Path, topology: Topology) -> None:
    """During an evaluation the next round starts, unless the next batch is complete."""
    held = (f"evaluation.eval_data.same={tmp_path}/problems.jsonl", "evaluation.eval_interval=1")
    held += ("evaluation.n_samples_per_eval_prompt=1",)
    run = Trainer(small_config(tmp_path, *UEC, *held, "train.num_rollout=8"), topology)
    run.collector.config = override(run.config, ["rollout.engine=sglang"])  # type: ignore[attr-defined]
    load, evaluate, ended, begun = run.engine.load_weights, run.evaluator.evaluate, [], []

    def loading(*arguments: Any) -> None:
        collector: Any = run.collector
        ended.append(collector._round is None and collector.ahead is None)
        load(*arguments)

    def evaluating(step: int) -> Any:
        begun.append(run.collector._round is not None)  # type: ignore[attr-defined]
        return evaluate(step)

    run.engine.load_weights = loading  # type: ignore[method-assign]
    run.evaluator.evaluate = evaluating  # type: ignore[method-assign]
    assert run.run(Interrupt())
    assert all(ended) and set(begun) == {True, False}


def test_a_buffer_that_never_fills_is_an_error(tmp_path: Path, topology: Topology) -> None:
    never = (*UEC, "scoring.reward=tests.rewards.no_signal", "train.num_rollout=1")
    with pytest.raises(NoSignalError, match=r"only 0 of the 16 rollouts of a batch .* after 8 gen"):
        Trainer(small_config(tmp_path, *never), topology).run(Interrupt())
    partial = ("rollout.accept_partial_batch=true", "rollout.max_generation_rounds=1")
    config = small_config(tmp_path, *never, *partial, f"run.dir={tmp_path}/partial")
    assert Trainer(config, topology).run(Interrupt())
    (row,) = rows_of(config)
    assert row["skipped"] == 1 and row["resampled_prompts"] == 4 and row["buffered_rollouts"] == 0


def test_unchosen_rollouts_are_only_measured(tmp_path: Path, topology: Topology) -> None:
    high = ("rollout.resampling.min_advantage=9", "rollout.resampling.min_resampled_advantage=9")
    partial = ("rollout.accept_partial_batch=true", "rollout.max_generation_rounds=1")
    config = small_config(tmp_path, *UEC, *high, *partial, "train.num_rollout=1")
    assert Trainer(config, topology).run(Interrupt())
    (row,) = rows_of(config)
    assert row["skipped"] == 1 and row["signal_fraction"] > 0 and "grad_norm" not in row


@pytest.mark.slow
def test_ranks_share_the_buffer_and_resume_bit_for_bit(tmp_path: Path, topology: Topology) -> None:
    config = small_config(tmp_path, *UEC, "train.num_rollout=8")
    assert Trainer(config, topology).run(Interrupt())
    alone = rows_of(config)
    (one, resumed), (other, _) = run_distributed(measured_on_ranks, 2, str(tmp_path), UEC, 8)
    assert one == other == resumed and len(one) == 8
    assert any("replayed_rollouts" in row for row in one)
    for row, expected in zip(one, alone, strict=True):
        for key in ("sequences", "loss_tokens", "buffered_rollouts", "replayed_rollouts"):
            assert row.get(key) == expected.get(key), key
        for key in ("loss", "entropy", "surprisal", "grad_norm"):
            assert row[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-5), key


@pytest.mark.parametrize("other", ["rounds", "stream"])
def test_a_run_may_change_its_way_of_sampling(
    other: str, tmp_path: Path, topology: Topology
) -> None:
    """A run without the queue draws its prompts again, and the other way round."""
    ways = {
        "rounds": ("rollout.over_sampling_batch_size=7", "rollout.dynamic_sampling=true"),
        "stream": ("rollout.asynchrony=fully_async",),
    }
    shared = [item for item in UEC if not item.startswith("rollout.resampling")]
    plain = (*shared, "rollout.max_staleness=2", *ways[other])
    steps = [(*UEC,), plain] if other == "stream" else [(*UEC,), plain, (*UEC,)]
    for number, options in enumerate(steps):
        last = f"train.num_rollout={4 * (number + 1)}"
        run = Trainer(small_config(tmp_path, *options, last, "run.save_interval=4"), topology)
        load, sizes = run.collector.load_state, []

        def loading(state: dict[str, Any], load: Any = load, sizes: Any = sizes) -> None:
            sizes.append(len(state["ready"]))
            load(state)

        run.collector.load_state = loading  # type: ignore[method-assign]
        step = run.learner.step
        seen: list[Sequence[Group]] = []

        def stepping(
            groups: Sequence[Group], *rest: Any, step: Any = step, seen: Any = seen
        ) -> Any:
            seen.append(groups)
            return step(groups, *rest)

        run.learner.step = stepping  # type: ignore[method-assign]
        assert run.run(Interrupt())
        assert (sizes[0] > 0) if number else not sizes
        if options == plain:
            assert all(len(group.rollouts) == 4 for groups in seen for group in groups)
        else:
            assert all(r.advantage for groups in seen for group in groups for r in group.rollouts)
