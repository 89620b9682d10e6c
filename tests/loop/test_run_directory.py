"""Settings that may change in a continued run, the messages about them, and the schedule."""

from __future__ import annotations

import dataclasses
import errno
import json
from pathlib import Path

import pytest

from megatron_stare.config import Config, UserError
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.run_directory import (
    FIXED,
    HISTORY_NAME,
    check_prompts,
    claim_prompts,
    is_fixed,
    locked,
)
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy.topology import Topology
from tests.small_run import rows_of, small_config


def fields(config: Config) -> list[str]:
    sections = dataclasses.asdict(config)
    return [f"{section}.{name}" for section, values in sections.items() for name in values]


def test_fixed_settings_are_fields_and_all_others_may_change() -> None:
    known = fields(Config())
    for name in FIXED:
        assert any(key == name or key.startswith(name) for key in known), name
    assert is_fixed("data.prompt_data") and is_fixed("scoring.rewards.math")
    assert not is_fixed("optimizer.lr") and not is_fixed("scoring.remote_url")
    free = (
        "rollout.engine rollout.asynchrony evaluation.eval_interval run.save_interval sglang.port"
    )
    assert not any(is_fixed(key) for key in free.split())


def test_a_damaged_digest_of_prompts_is_named(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    run = Path(config.run.dir)
    claim_prompts(config, 36, "0123456789abcdef")
    (run / "metrics.jsonl").write_text("{}\n")
    (run / "prompts.json").write_text('{"prom')
    with pytest.raises(UserError, match=r"prompts\.json is damaged .*; restore it, or remove it"):
        check_prompts(config, 36, "0123456789abcdef")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("run.seed=1", r"run\.seed=0, not 1"),
        ("data.shuffle=false", r"data\.shuffle=True, not False"),
        ("loss.name=dapo", r"loss\.name='stare', not 'dapo'"),
    ],
)
def test_another_run_is_refused_in_the_same_directory(
    option: str, message: str, tmp_path: Path, topology: Topology
) -> None:
    Trainer(small_config(tmp_path, "train.num_rollout=1"), topology).run(Interrupt())
    with pytest.raises(UserError, match=rf"holds a run with {message}; choose another run\.dir"):
        Trainer(small_config(tmp_path, "train.num_rollout=1", option), topology)


def test_other_prompts_are_refused_and_corrected_labels_are_not(
    tmp_path: Path, topology: Topology
) -> None:
    """A run resumes by numbers of draws, which mean other problems in another file."""
    first = small_config(tmp_path, "train.num_rollout=1")
    assert Trainer(first, topology).run(Interrupt())
    config = small_config(tmp_path, "train.num_rollout=2")
    problems = tmp_path / "problems.jsonl"
    rows = [json.loads(line) for line in problems.read_text().splitlines()]

    def write(rows: list[dict[str, str]]) -> None:
        problems.write_text("".join(json.dumps(row) + "\n" for row in rows))

    message = "run holds a run on other training prompts: 36 with digest .{16}, and now "
    for others, count in ((rows[1:], 35), ([rows[1], rows[0], *rows[2:]], 36)):
        write(others)
        with pytest.raises(UserError, match=f"{message}{count} with digest .*another run.dir"):
            Trainer(config, topology)
    write([row | {"label": "corrected"} for row in rows])
    assert Trainer(config, topology).run(Interrupt())


@pytest.mark.parametrize(
    "mistake",
    ["policy.hf_checkpoint=no/such/model", "loss.name=gropo", "data.prompt_data=missing.jsonl"],
)
def test_a_start_that_failed_leaves_no_claim_on_its_directory(
    mistake: str, tmp_path: Path, topology: Topology
) -> None:
    with pytest.raises(UserError):
        Trainer(small_config(tmp_path, "train.num_rollout=1", mistake), topology)
    corrected = small_config(tmp_path, "train.num_rollout=1", "run.seed=5")
    assert Trainer(corrected, topology).run(Interrupt())
    assert len(rows_of(corrected)) == 1


def test_a_start_with_an_unknown_checkpoint_changes_no_setting(
    tmp_path: Path, topology: Topology
) -> None:
    config = small_config(tmp_path, "train.num_rollout=1")
    assert Trainer(config, topology).run(Interrupt())
    before = {file: file.read_bytes() for file in (tmp_path / "run").glob("*.*")}
    other = small_config(tmp_path, "train.num_rollout=9", "optimizer.lr=0.5")
    with pytest.raises(UserError, match=r"--load step_00000007: not in .*; there are step_"):
        Trainer(other, topology, "step_00000007").run(Interrupt())
    assert {file: file.read_bytes() for file in (tmp_path / "run").glob("*.*")} == before


def test_a_lower_learning_rate_takes_effect_and_is_reported_and_kept(
    tmp_path: Path, topology: Topology, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("optimizer.lr_warmup_iters=0",)
    assert Trainer(small_config(tmp_path, "train.num_rollout=2", *options), topology).run(
        Interrupt()
    )
    capsys.readouterr()
    lower = small_config(tmp_path, "train.num_rollout=3", *options, "optimizer.lr=1e-4")
    assert Trainer(lower, topology).run(Interrupt())
    assert [row["lr"] for row in rows_of(lower)] == [3e-3, 3e-3, 1e-4]
    printed = capsys.readouterr().err
    assert "optimizer.lr: 0.003 -> 0.0001" in printed and "train.num_rollout: 2 -> 3" in printed
    assert "schedule: max_lr 0.003 -> 0.0001, from the next update on" in printed
    (line,) = (tmp_path / "run" / HISTORY_NAME).read_text().splitlines()
    assert json.loads(line)["changes"]["optimizer.lr"] == [0.003, 0.0001]


@pytest.mark.parametrize("spread", [pytest.param("false", marks=pytest.mark.slow), "true"])
def test_an_extended_run_decays_over_its_new_length(
    spread: str, tmp_path: Path, topology: Topology, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lr of step k is that of a run planned with the new length from the start."""
    options = (
        "optimizer.lr_decay_style=linear",
        "optimizer.lr_warmup_iters=0",
        f"policy.use_distributed_optimizer={spread}",
    )
    short = small_config(tmp_path, "train.num_rollout=3", *options)
    assert Trainer(short, topology).run(Interrupt())
    assert [row["lr"] for row in rows_of(short)] == pytest.approx([3e-3 * n / 4 for n in (3, 2, 1)])
    long = small_config(tmp_path, "train.num_rollout=5", *options)
    assert Trainer(long, topology).run(Interrupt())
    assert [row["lr"] for row in rows_of(long)][3:] == pytest.approx([3e-3 * n / 6 for n in (2, 1)])
    assert "schedule: lr_decay_steps 4 -> 6, from the next update on" in capsys.readouterr().err


def test_the_last_planned_update_still_learns_and_explicit_decay_ends_where_it_says(
    tmp_path: Path, topology: Topology
) -> None:
    options = ("optimizer.lr_decay_style=cosine", "optimizer.lr_warmup_iters=0")
    config = small_config(tmp_path, "train.num_rollout=3", *options, "optimizer.lr_decay_iters=2")
    assert Trainer(config, topology).run(Interrupt())
    assert [row["lr"] for row in rows_of(config)] == pytest.approx([1.5e-3, 0.0, 0.0])


@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param("on_policy", "one_step_off", marks=pytest.mark.slow),
        ("one_step_off", "fully_async"),
        pytest.param("fully_async", "on_policy", marks=pytest.mark.slow),
    ],
)
def test_asynchrony_may_change_and_no_prompt_is_lost(
    first: str, then: str, tmp_path: Path, topology: Topology
) -> None:
    """Every prompt that was drawn is trained, or waits: none is skipped, none is taken twice."""
    options = ("rollout.dynamic_sampling=false", "rollout.max_staleness=5")
    trained: list[int] = []
    for mode, steps in ((first, 2), (then, 5)):
        config = small_config(
            tmp_path, *options, f"rollout.asynchrony={mode}", f"train.num_rollout={steps}"
        )
        trainer = Trainer(config, topology)
        learn = trainer.learner.step

        def recorded(groups, *rest, learn=learn):
            trained.extend(group.prompt.index for group in groups)
            return learn(groups, *rest)

        trainer.learner.step = recorded  # type: ignore[method-assign]
        assert trainer.run(Interrupt())
    assert len(trained) == len(set(trained)) == 20
    assert sorted(trained[:8]) == list(range(8)) and set(range(16)) <= set(trained)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_a_file_system_without_locks_is_a_warning(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Lustre mount without flock answers so."""

    def refuse(*_: object) -> None:
        raise OSError(number, "no locks")

    monkeypatch.setattr("fcntl.flock", refuse)
    with locked(tmp_path):
        assert "mount it with flock" in capsys.readouterr().err
