"""One process: resume, kill -9, signals, batches without signal, carried-over groups."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_stare.__main__ import main
from megatron_stare.collect import rollout_buffer
from megatron_stare.config import Config, TrainConfig, UserError, dump
from megatron_stare.loop import progress as progress_module
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy.conversion import convert
from megatron_stare.policy.model import PolicyModel
from megatron_stare.policy.topology import Topology
from megatron_stare.reporting.logbook import read_metrics
from megatron_stare.reporting.provenance import read_starts
from megatron_stare.scoring.verdict import Sample
from tests.forked import Command, train
from tests.small_run import rows_of, small_config
from tests.tiny_models import tiny_config, write_checkpoint

SPREAD = "policy.use_distributed_optimizer=true"
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def test_a_changed_w_of_adaptive_stare_applies_to_a_resumed_run(
    tmp_path: Path, topology: Topology
) -> None:
    """M, whose setting is the same, continues."""
    first = small_config(tmp_path, "train.num_rollout=2")
    assert Trainer(first, topology).run(Interrupt())
    changed = small_config(tmp_path, "train.num_rollout=3", "loss.reweight_w=1.4")
    assert Trainer(changed, topology).run(Interrupt())
    _, before, after = rows_of(changed)
    step = changed.loss.alpha
    assert abs(after["weight_w"] - 1.4) == pytest.approx(step)
    assert abs(after["weight_m"] - before["weight_m"]) == pytest.approx(step)


@pytest.mark.parametrize(
    "kind",
    [
        ("policy.dtype=bf16", SPREAD),
        ("adapters.rank=2", "loss.kl_loss_coef=0.1"),
        ("loss.kl_loss_coef=0.1", "policy.ref_update_interval=2"),
        slow(()),
        slow((SPREAD,)),
        slow(("policy.dtype=bf16",)),
    ],
    ids=str,
)
def test_a_run_stopped_and_resumed_repeats_the_uninterrupted_one(
    kind: tuple[str, ...], tmp_path: Path, topology: Topology
) -> None:
    common = ("optimizer.lr_decay_iters=6", *kind)
    whole = small_config(tmp_path, "train.num_rollout=6", f"run.dir={tmp_path}/whole", *common)
    assert Trainer(whole, topology).run(Interrupt())
    options = (f"run.dir={tmp_path}/parts", *common)
    first = small_config(tmp_path, "train.num_rollout=2", *options)
    assert Trainer(first, topology).run(Interrupt())
    resumed = Trainer(small_config(tmp_path, "train.num_rollout=6", *options), topology)
    assert resumed.run(Interrupt())
    assert rows_of(resumed.config) == rows_of(whole)
    assert [row["step"] for row in rows_of(whole)] == [1, 2, 3, 4, 5, 6]
    assert resumed.collector.stream.position > 0
    assert rows_of(whole)[-1]["weight_w"] > rows_of(whole)[0]["weight_w"], (
        "the adaptive weight must carry over"
    )


def wait_for_step(config: Config, step: int, child: Command) -> None:
    path = Path(config.run.dir) / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (path.is_file() and len(read_metrics(path)) >= step):
        if child.code is not None or time.monotonic() > deadline:
            child.kill()
            raise AssertionError(f"no step {step} was reached:\n{child.output}")
        time.sleep(0.02)


def test_kill_nine_in_the_middle_loses_and_doubles_nothing(
    tmp_path: Path, topology: Topology
) -> None:
    options = ("train.num_rollout=12", "run.save_interval=3")
    whole = small_config(tmp_path, *options, f"run.dir={tmp_path}/whole")
    killed = small_config(tmp_path, *options, f"run.dir={tmp_path}/killed")
    child = train(killed)
    wait_for_step(killed, 5, child)
    child.kill()
    assert len(rows_of(killed)) < 12
    assert Trainer(whole, topology).run(Interrupt())
    again = train(killed)
    assert again.wait(300) == 0, again.output
    assert rows_of(killed) == rows_of(whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, slow(signal.SIGUSR1), slow(signal.SIGINT)])
def test_a_signal_saves_and_the_same_command_resumes(
    tmp_path: Path, number: signal.Signals
) -> None:
    config = small_config(tmp_path, "train.num_rollout=400", f"run.dir={tmp_path}/run")
    child = train(config)
    wait_for_step(config, 2, child)
    child.signal(number)
    assert child.wait(60) == (130 if number == signal.SIGINT else 0), child.output
    assert "Traceback" not in child.output
    reached = rows_of(config)[-1]["step"]
    assert reached < 400
    assert (tmp_path / "run/checkpoints/latest").read_text() == f"step_{reached:08d}"


def test_a_batch_without_signal_says_so_and_changes_nothing(
    tmp_path: Path, topology: Topology
) -> None:
    config = small_config(
        tmp_path,
        "scoring.reward=tests.rewards.no_signal",
        "rollout.dynamic_sampling=false",
        "train.num_rollout=2",
    )
    run = Trainer(config, topology)
    before = {name: tensor.clone() for name, tensor in run.actor.weights()}
    assert run.run(Interrupt())
    for row in rows_of(config):
        assert (
            row["skipped"] == 1
            and row["signal_fraction"] == 0
            and row["entropy"] > 0
            and "loss" not in row
        )
    for name, tensor in run.actor.weights():
        assert tensor.equal(before[name]), name
    longer = dataclasses.replace(config, train=TrainConfig(num_rollout=3))
    assert Trainer(longer, topology).run(Interrupt()), (
        "an optimizer that has never stepped saves and loads"
    )


@pytest.mark.parametrize(("estimator", "skipped"), [("nsr", 0), ("psr", 1)])
def test_wrong_responses_alone_train_where_the_estimator_learns_from_them(
    tmp_path: Path, topology: Topology, estimator: str, skipped: int
) -> None:
    config = small_config(
        tmp_path,
        "scoring.reward=tests.rewards.no_signal",
        f"scoring.advantage={estimator}",
        "rollout.dynamic_sampling=false",
        "loss.name=dapo",
    )
    run = Trainer(config, topology)
    run.engine.load_weights(run.actor.weights(), 0)
    metrics = run.train_step()
    assert metrics is not None and metrics["skipped"] == skipped
    # ratio 1 and advantage -1 everywhere
    assert skipped or metrics["loss"] == pytest.approx(1.0)


def test_a_crashing_verifier_costs_samples_and_not_the_run(
    tmp_path: Path, topology: Topology
) -> None:
    config = small_config(
        tmp_path,
        "scoring.rewards={tests.scoring.verifier_cases.even_or_exit: 2, language: 0.5}",
        "scoring.reward=tests.scoring.verifier_cases.even_or_exit",
        "scoring.verifier_timeout=60",
        f"evaluation.eval_data.held_out={tmp_path / 'problems.jsonl'}",
        "evaluation.eval_interval=2",
        "evaluation.n_samples_per_eval_prompt=1",
        "train.num_rollout=2",
    )
    run = Trainer(config, topology)
    assert run.run(Interrupt())
    rows = rows_of(config)
    assert len(rows) == 2 and all(row["loss"] == row["loss"] for row in rows)
    assert sum(row["unverifiable"] for row in rows) > 0
    for row in rows:
        parts = row["reward/tests.scoring.verifier_cases.even_or_exit"], row["reward/language"]
        assert 0 < parts[0] < 1 and 0 <= parts[1] <= 1 and 0 < row["reward"] <= 2.5
        assert row["verifier_kills"] == 2 * row["unverifiable"]
    assert rows[1]["eval/held_out/unverifiable"] + 36 * rows[1]["eval/held_out/avg_at_k"] <= 36
    with pytest.raises(RuntimeError, match="closed"):
        run.judge.verdicts([Sample("1", "1")])


def test_a_reward_of_a_group_sees_the_rollouts_of_a_prompt(
    tmp_path: Path, topology: Topology
) -> None:
    """A function that is right about every second response of its list: half of each group."""
    config = small_config(
        tmp_path,
        "scoring.reward=tests.rewards.every_second",
        f"evaluation.eval_data.held_out={tmp_path / 'problems.jsonl'}",
        "evaluation.eval_interval=1",
        "evaluation.n_samples_per_eval_prompt=2",
        "train.num_rollout=1",
    )
    assert Trainer(config, topology).run(Interrupt())
    (row,) = rows_of(config)
    assert row["reward"] == row["eval/held_out/avg_at_k"] == 0.5
    assert row["eval/held_out/pass_at_k"] == 1.0 and row["unverifiable"] == 0


def test_a_run_without_any_signal_ends_with_its_rewards(tmp_path: Path, topology: Topology) -> None:
    config = small_config(
        tmp_path, "scoring.reward=tests.rewards.no_signal", "rollout.max_generation_rounds=3"
    )
    with pytest.raises(
        UserError, match=r"only 0 of .*=4 groups .* 3 generation rounds \(rewards seen: 0 x 48\)"
    ):
        Trainer(config, topology).run(Interrupt())


def test_no_signal_for_many_steps_ends_the_run(
    tmp_path: Path, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module, "MAX_STEPS_WITHOUT_SIGNAL", 3)
    config = small_config(
        tmp_path,
        "scoring.reward=tests.rewards.no_signal",
        "rollout.max_generation_rounds=1",
        "rollout.accept_partial_batch=true",
        "train.num_rollout=9",
    )
    with pytest.raises(UserError, match=r"signal for 3 steps in a row \(rewards seen: 0 x 16\)"):
        Trainer(config, topology).run(Interrupt())
    assert [row["step"] for row in rows_of(config)] == [1, 2]
    assert (tmp_path / "run/checkpoints/latest").read_text() == "step_00000003", (
        "what was done is kept"
    )


@pytest.mark.parametrize(
    "how",
    [
        ("rollout.max_generation_rounds=3",),
        ("rollout.max_generation_rounds=1", "rollout.accept_partial_batch=true"),
        ("rollout.dynamic_sampling=false",),
        ("rollout.asynchrony=one_step_off",),
        ("rollout.asynchrony=fully_async", "rollout.max_staleness=1"),
    ],
    ids=str,
)
def test_a_solved_task_is_a_success(
    how: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 0, a checkpoint, the report and a sentence; the same command says so again."""
    monkeypatch.setattr(progress_module, "MAX_STEPS_WITHOUT_SIGNAL", 2)
    reward = f"scoring.reward={__name__}.learned"
    config = small_config(tmp_path, reward, *how, "train.num_rollout=30")
    dump(config, tmp_path / "run.yaml")
    judged_right_from(40)
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    said = capsys.readouterr()
    steps = len(rows_of(config))
    assert 0 < steps < 30 and f"the run ends after {steps} steps: the task is solved: " in said.out
    assert (tmp_path / "run/checkpoints/latest").read_text() == f"step_{steps:08d}"
    assert (tmp_path / "run/report.html").is_file() and "stopped" not in said.err
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    assert "the task is solved: " in capsys.readouterr().out


def test_a_task_solved_from_the_start_says_what_may_be_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(tmp_path, f"scoring.reward={__name__}.learned")
    dump(config, tmp_path / "run.yaml")
    judged_right_from(0)
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    assert "the run ends after 0 steps: the task is solved: " in (said := capsys.readouterr().out)
    assert "right before the first step; choose harder problems, or check scoring.reward" in said
    assert (tmp_path / "run/report.html").is_file()


def test_all_positive_scores_are_not_a_solved_task(tmp_path: Path, topology: Topology) -> None:
    config = small_config(tmp_path, f"scoring.reward={__name__}.score")
    with pytest.raises(UserError, match=r"rollout\.dynamic_sampling_metric=reward would keep"):
        Trainer(config, topology).run(Interrupt())


_judged, _right_from = itertools.count(), 0


def judged_right_from(number: int) -> None:
    """From this response on, `learned` calls all right."""
    global _judged, _right_from
    _judged, _right_from = itertools.count(), number


def learned(response: str, label: str, metadata: dict[str, Any]) -> float:
    """One of two neighbours is right, and later all are."""
    number = next(_judged)
    return 1.0 if number >= _right_from else float(number % 2)


def score(response: str, label: str, metadata: dict[str, Any]) -> float:
    """Like a reward model's: never 0."""
    return 0.5 + len(response) / 100


SURPLUS = ("rollout.over_sampling_batch_size=12", "train.num_rollout=4")


def test_on_policy_stale_groups_are_dropped_and_counted(tmp_path: Path, topology: Topology) -> None:
    config = small_config(tmp_path, *SURPLUS)
    assert Trainer(config, topology).run(Interrupt())
    rows = rows_of(config)
    assert all(row["surplus_groups"] > 0 and row["stale_token_fraction"] == 0 for row in rows)
    for before, row in itertools.pairwise(rows):
        assert row["stale_groups_dropped"] == before["surplus_groups"]


@pytest.mark.parametrize(("rounds", "asked"), [(8, [6, 2, 3]), (3, [6, 2, 6])])
def test_a_later_round_samples_only_missing_prompts(
    rounds: int,
    asked: list[int],
    tmp_path: Path,
    topology: Topology,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the rate at which groups carried signal so far; the last round asks for all it may."""
    wanted = {0, 1, 2, 8}
    monkeypatch.setattr(
        rollout_buffer, "is_wanted", lambda group, rollout: group.prompt.index in wanted
    )
    settings = ("rollout.over_sampling_batch_size=6", f"rollout.max_generation_rounds={rounds}")
    trainer = Trainer(small_config(tmp_path, *settings, "train.num_rollout=1"), topology)
    buffer = trainer.collector
    assert isinstance(buffer, rollout_buffer.RolloutBuffer)
    drawn: list[int] = []
    draw = buffer.stream.draw
    monkeypatch.setattr(buffer.stream, "draw", lambda count: drawn.append(count) or draw(count))
    assert trainer.run(Interrupt())
    assert drawn == asked
    (row,) = rows_of(trainer.config)
    assert row["groups"] == 4 and row["generation_rounds"] == 3 and row["surplus_groups"] == 0


def test_surplus_groups_are_carried_over_then_dropped_when_stale(
    tmp_path: Path, topology: Topology
) -> None:
    config = small_config(tmp_path, *SURPLUS, "rollout.max_staleness=1")
    assert Trainer(config, topology).run(Interrupt())
    rows = rows_of(config)
    assert rows[0]["surplus_groups"] > 0 and rows[0]["stale_token_fraction"] == 0
    assert rows[1]["stale_token_fraction"] > 0, "the second step trains on groups of the first"
    assert all(row["groups"] == 4 and row["sequences"] == 16 for row in rows)
    assert sum(row["stale_groups_dropped"] for row in rows) > 0


def test_metrics_and_config_are_written(tmp_path: Path, topology: Topology) -> None:
    config = small_config(tmp_path)
    assert Trainer(config, topology).run(Interrupt())
    last = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    wanted = (
        "step loss grad_norm entropy reward gate response_length logprob_diff_mean "
        "logprob_diff_max lr"
    )
    seconds = "rollout score update sync total"
    assert {*wanted.split(), *(f"seconds_{phase}" for phase in seconds.split())} <= {*last}
    assert last["logprob_diff_max"] < 1e-4
    assert (tmp_path / "run/config.yaml").is_file()
    assert [start["ranks"] for start in read_starts(tmp_path / "run")] == [1]
    assert Trainer(config, topology).run(Interrupt())
    assert len(read_starts(tmp_path / "run")) == 1, "a complete run does not start again"


def test_the_same_run_twice_is_bit_identical(tmp_path: Path, topology: Topology) -> None:
    runs = [
        small_config(tmp_path, f"run.dir={tmp_path}/run{n}", "policy.packed_sequences=true")
        for n in range(2)
    ]
    for config in runs:
        assert Trainer(config, topology).run(Interrupt())
    assert rows_of(runs[0]) == rows_of(runs[1])


def steps_of(
    directory: Path, topology: Topology, name: str, *overrides: str
) -> tuple[list[dict], dict]:
    trainer = Trainer(small_config(directory, f"run.dir={directory}/{name}", *overrides), topology)
    trainer.engine.load_weights(trainer.actor.weights(), 0)
    rows = [trainer.train_step() for _ in range(3)]
    return rows, {key: tensor.clone() for key, tensor in trainer.actor.weights()}


def test_an_update_of_the_same_policy_needs_no_scoring_pass(
    tmp_path: Path, topology: Topology
) -> None:
    """A loss without a plan reports what its update saw;
    STARE with a shut gate is the same loss, scored first.
    """
    unscored, weights = steps_of(tmp_path, topology, "dapo", "loss.name=dapo")
    shut, expected = steps_of(tmp_path, topology, "shut", "loss.target_entropy=0")
    for ours, theirs in zip(unscored, shut, strict=True):
        assert "sensitivity_positive" not in ours and "sensitivity_positive" in theirs
        for key in ("loss", "grad_norm", "entropy", "surprisal", "logprob_diff_max", "reward"):
            assert ours[key] == theirs[key], key
    for name, tensor in weights.items():
        assert tensor.equal(expected[name]), name


@pytest.mark.slow  # of each update: test_learn_updates.py
def test_mini_batches_and_epochs_use_the_ratio(tmp_path: Path, topology: Topology) -> None:
    one, _ = steps_of(tmp_path, topology, "one", "optimizer.lr=0.05")
    options = ("optimizer.lr=0.05", "train.num_steps_per_rollout=2", "train.epochs=2")
    many, weights = steps_of(tmp_path, topology, "many", *options)
    _, other = steps_of(tmp_path, topology, "frozen", *options, "train.replan=false")
    assert (
        many[0]["loss_tokens"] == one[0]["loss_tokens"]
        and many[0]["sequences"] == one[0]["sequences"]
    )
    assert many[0]["reward"] == one[0]["reward"]
    assert many[0]["loss"] != one[0]["loss"], "from the second update on the ratio is not 1"
    assert any(not tensor.equal(other[name]) for name, tensor in weights.items()), (
        "a new plan chooses other tokens"
    )


@pytest.mark.parametrize("top_k", [0, 32])
def test_distillation_approaches_the_teacher_without_rewards(
    top_k: int, tmp_path: Path, topology: Topology
) -> None:
    """Equal rewards, which dynamic sampling would drop, carry a teacher's signal."""
    shape = {"vocab_size": 257, "eos_token_id": 0, "max_position_embeddings": 64}
    teacher = write_checkpoint(tmp_path / "teacher", tiny_config("qwen2", **shape), seed=7)
    config = small_config(
        tmp_path,
        *("loss.distillation_coef=1", "loss.reward_coef=0", "loss.name=dapo"),
        *(f"policy.ref_hf_checkpoint={teacher}", "rollout.dynamic_sampling=false"),
        *("scoring.reward=tests.rewards.no_signal", "train.num_rollout=12"),
        *("optimizer.lr=3e-2", "rollout.rollout_batch_size=8"),
        f"loss.distillation_top_k={top_k}",
    )
    assert Trainer(config, topology).run(Interrupt())
    rows = rows_of(config)
    kl = [row["teacher_kl" if top_k else "reference_kl"] for row in rows]
    assert [row["skipped"] for row in rows] == [0] * 12 and not any(row["reward"] for row in rows)
    assert sum(kl[-3:]) < 0.7 * sum(kl[:3]), kl


def test_a_kl_term_holds_the_policy_at_its_reference(tmp_path: Path, topology: Topology) -> None:
    start = {
        key: tensor.clone()
        for key, tensor in Trainer(small_config(tmp_path), topology).actor.weights()
    }

    def distance(weights: dict) -> float:
        return sum(float((weights[name] - start[name]).square().sum()) for name in start)

    free = steps_of(tmp_path, topology, "free", "train.epochs=6")[1]
    held = steps_of(
        tmp_path,
        topology,
        "held",
        "train.epochs=6",
        "loss.kl_loss_coef=100",
        "loss.kl_loss_type=k2",
    )[1]
    assert 0 < distance(held) < distance(free)


@pytest.mark.parametrize(
    "kind", [(), ("policy.dtype=bf16", "policy.offload_while_generating=true")]
)
def test_an_updated_reference_is_the_policy_of_that_step(
    kind: tuple[str, ...], tmp_path: Path, topology: Topology
) -> None:
    """Directly after an update the reference gives every token the policy's own log-prob; a
    checkpoint that holds a reference converts to the policy.
    """
    kl = ("loss.kl_loss_coef=0.1", "train.num_rollout=6", *kind)
    rows, moved = {}, {}
    for interval in (0, 2):
        options = (f"policy.ref_update_interval={interval}", f"run.dir={tmp_path}/{interval}")
        config = small_config(tmp_path, *kl, *options)
        trainer = Trainer(config, topology)
        assert trainer.run(Interrupt())
        rows[interval] = rows_of(config)
        moved[interval] = [abs(row["reference_kl"]) > 1e-9 for row in rows[interval]]
    assert moved[0] == [False, True, True, True, True, True]
    assert moved[2] == [False, True, False, True, False, True]
    assert rows[0][:2] == rows[2][:2]
    convert.megatron_to_hf(tmp_path / "2/checkpoints/step_00000006", tmp_path / "hf", topology)
    converted = PolicyModel(f"{tmp_path}/hf", config.policy, topology, 1.0)
    assert converted.fingerprint() == trainer.actor.fingerprint()
