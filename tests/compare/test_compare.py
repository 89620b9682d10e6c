"""Comparisons of objectives: the arms that a list of losses makes, and the command end to end."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

from megatron_stare.__main__ import main
from megatron_stare.compare import compare
from megatron_stare.compare.compare import (
    ONE_STEP,
    _arm_config,
    _runs_at_once,
    _write_summary,
    between_losses,
    caveats,
    run_side_by_side,
)
from megatron_stare.config import (
    Config,
    NonFiniteError,
    NoSignalError,
    RunAlarm,
    UserError,
    check_arms,
    override,
)
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.losses import objective_of
from megatron_stare.losses.registry import all_objectives
from megatron_stare.recipes import find_recipe
from megatron_stare.reporting.logbook import read_metrics
from tests.forked import Arm, start_arm
from tests.paths import ROOT
from tests.small_run import small_config

SHORT = (
    "train.num_rollout=2",
    "cold_start.steps=4",
    "rollout.rollout_batch_size=4",
    "scoring.reward=tests.rewards.even_characters",
    "evaluation.eval_interval=2",
    "evaluation.n_samples_per_eval_prompt=2",
)


def test_a_name_is_the_recipes_arm_or_else_an_objective() -> None:
    recipe = find_recipe("quickstart")
    compared = between_losses(recipe, ["steer", "stare", "grpo_ds"]).compare
    assert compared.run == ["steer", "stare", "grpo_ds"]
    assert compared.arms == recipe.compare.arms | {"steer": ["loss.name=steer"]}


def test_a_loss_of_the_users_is_compared_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "compared_losses.py").write_text(
        "from megatron_stare.losses import policy_loss\n"
        "@policy_loss()\n"
        "def of_a_comparison(tokens):\n"
        "    return -tokens.advantage * tokens.ratio\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("megatron_stare.losses.registry._objectives", all_objectives())
    name = "compared_losses.of_a_comparison"
    config = between_losses(find_recipe("quickstart"), ["stare", name])
    assert config.compare.arms[name] == [f"loss.name={name}"]
    with pytest.raises(UserError, match="compared_losses has no 'of_a_comparisn'; did you mean"):
        between_losses(find_recipe("quickstart"), ["compared_losses.of_a_comparisn"])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["stare", "ster"], "--losses names 'ster', which is unknown; did you mean 'steer'?"),
        (["dapo", "stare", "dapo"], "--losses names 'dapo' 2 times"),
        ([""], "--losses names '', which is unknown"),
    ],
)
def test_a_wrong_list_is_refused_before_any_file_is_made(names: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        between_losses(find_recipe("quickstart"), names)
    assert str(caught.value).startswith(message)


def test_an_item_of_an_arm_without_a_value_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Next to an override of the command too, which is compared with every item."""
    arms = tmp_path / "arms.yaml"
    arms.write_text("compare: {arms: {a: [foo], b: []}}\n")
    assert main(["train", str(arms), "train.num_rollout=3", f"run.dir={tmp_path}/run"]) == 2
    assert "arm a: override 'foo' has no '='" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["compare quickstart --losses stare", "train quickstart"])
def test_an_override_that_no_arm_would_take_is_refused_with_one_that_does(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The arm sets W's bound itself, and the printed remedy changes it in the arm. A setting that
    the arm does not set needs no remedy.
    """
    place = f"run.dir={tmp_path}/run"
    assert main([*command.split(), place, "loss.w_max=4"]) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert (
        "override 'loss.w_max=4' changes nothing in arm 'stare', which sets loss.w_max=2.0"
        in printed
    )
    assert not (tmp_path / "run").exists()
    remedy = printed.split("change the arm: '")[1].split("'")[0]
    changed = override(find_recipe("quickstart"), [remedy, "loss.target_entropy=0.2"])
    check_arms(changed, [remedy, "loss.target_entropy=0.2", "loss.w_max=3"])
    arm = _arm_config(changed, "stare", "model", tmp_path)
    assert arm.loss.w_max == 4 and arm.loss.alpha == 0.05 and arm.loss.target_entropy == 0.2


# A run of `lost` has no signal after its first steps, and says so.
LOST = (
    f"scoring.reward={__name__}.lost",
    "scoring.function_timeout=0",  # one process, which counts all responses
    "rollout.accept_partial_batch=false",
)
_judged = itertools.count()


def lost(response: str, label: str, metadata: dict[str, Any]) -> float:
    """One of two neighbours is right, but none after the first 32."""
    number = next(_judged)
    return float(number % 2) if number < 32 else 0.0


def mastered(response: str, label: str, metadata: dict[str, Any]) -> float:
    """One of two neighbours is right, and all after the first 32."""
    number = next(_judged)
    return float(number % 2) if number < 32 else 1.0


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs start forked; tests/recipes/test_quickstart.py starts them as users do."""
    monkeypatch.setattr(compare, "_start", start_arm)


@pytest.mark.usefixtures("forked")
def test_an_arm_that_solves_its_task_is_complete(tmp_path: Path) -> None:
    solves = (f"scoring.reward={__name__}.mastered",)
    arms = {"mastered": solves, "sound": ()}
    runs = {
        name: small_config(tmp_path, *settings, f"run.dir={tmp_path / 'seed0' / name}")
        for name, settings in arms.items()
    }
    with Interrupt() as interrupt:
        assert run_side_by_side(list(runs.values()), interrupt) == {}
    _write_summary(
        runs["sound"], {(0, name): run for name, run in runs.items()}, [0], "compare", {}
    )
    summary = json.loads((tmp_path / "seed0/sound/summary.json").read_text())
    steps = summary["runs"]["mastered"]["steps"]
    assert 0 < steps < 3 and summary["runs"]["sound"]["steps"] == 3
    (sentence,) = (each for each in summary["caveats"] if each.startswith("seed0/mastered"))
    assert f"ended at step {steps}: the task is solved: " in sentence


def test_an_arm_is_measured_by_its_own_target(tmp_path: Path) -> None:
    """One without STARE by that of the comparison, next to which it is shown."""
    arms = {
        "stare": ("loss.name=stare", "loss.target_entropy=0.2"),
        "low": ("loss.name=stare", "loss.target_entropy=0.1"),
        "plain": ("loss.name=grpo",),
    }
    runs = {}
    for name, settings in arms.items():
        runs[0, name] = small_config(tmp_path, *settings, f"run.dir={tmp_path / name}")
        (tmp_path / name).mkdir()
        rows = [{"step": step, "entropy": 0.1, "reward": 0.5} for step in (1, 2)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    _write_summary(runs[0, "stare"], runs, [0], "compare", {})
    found = json.loads((tmp_path / "stare/summary.json").read_text())["runs"]
    targets = {name: run["target_entropy"] for name, run in found.items()}
    assert targets == {"stare": 0.2, "low": 0.1, "plain": 0.2}
    held = {name: run["entropy_in_band_fraction"] for name, run in found.items()}
    assert held == {"stare": 0.0, "low": 1.0, "plain": 0.0}


@pytest.mark.usefixtures("forked")
def test_a_failed_run_ends_no_other(tmp_path: Path) -> None:
    """Unless it never took a step: then the others would fail as well."""
    own = {"lost": LOST, "sound": (), "stuck": ("scoring.reward=tests.no_such_module.reward",)}
    runs = {
        name: small_config(tmp_path, *settings, f"run.dir={tmp_path / 'seed0' / name}")
        for name, settings in own.items()
    }
    with Interrupt() as interrupt:
        failed = run_side_by_side([runs["lost"], runs["sound"]], interrupt)
        assert failed is not None and failed.keys() == {"seed0/lost"}
        assert failed["seed0/lost"].startswith("error: only 0 of rollout.rollout_batch_size=4")
        rows = {n: read_metrics(tmp_path / f"seed0/{n}/metrics.jsonl") for n in ("lost", "sound")}
        assert len(rows["sound"]) == 3 and 0 < len(rows["lost"]) < 3
        with pytest.raises(UserError, match=r"arm stuck failed: error: scoring\.reward="):
            run_side_by_side([runs["stuck"], runs["sound"]], interrupt)


GB = 10**9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("available", "runs", "says"),
    [(9.9, 3, ""), (2.9, 2, "2 of 3 runs at a time: each may need 1.4 GB"), (0.1, 1, "1 of 3 ")],
)
def test_no_more_runs_at_a_time_than_memory_holds(
    available: float,
    runs: int,
    says: str,
    dtype: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run needs 1 GiB and 60 bytes per weight, whatever the dtype of the file."""
    save_file({"a": torch.zeros(5 * 10**6, dtype=dtype)}, tmp_path / "model.safetensors")
    config = override(Config(), [f"policy.hf_checkpoint={tmp_path}"])
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    memory = SimpleNamespace(available=int(available * GB))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert _runs_at_once([config] * 3) == runs
    assert _runs_at_once([]) == 1
    said = capsys.readouterr().err
    assert said.startswith(says) and bool(said) == bool(says)
    memory.available = 99 * GB
    assert _runs_at_once([config] * 99) == 8
    monkeypatch.setattr(compare.runtime, "device", lambda: torch.device("cuda"))
    assert _runs_at_once([config] * 99) == 1


def test_with_memory_for_one_run_the_next_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Arm] = []

    def noted(config: Config, threads: int, force: bool) -> Arm:
        assert all(child.poll() == 0 for child in begun) and threads == (os.cpu_count() or 1)
        assert force
        begun.append(start_arm(config, threads, force))
        return begun[-1]

    monkeypatch.setattr(compare, "_start", noted)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=GB))
    runs = [small_config(tmp_path, f"run.dir={tmp_path / name}") for name in ("first", "second")]
    with Interrupt() as interrupt:
        assert run_side_by_side(runs, interrupt, force=True) == {}
    assert len(begun) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_a_run_has_handlers_for_it_is_no_failure(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the seconds in which a run imports its libraries; Ctrl-C reaches every process."""
    interrupt = Interrupt()

    def begun(*_: object) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(["sleep", "60"])
        child.send_signal(number)
        interrupt.ask()
        return child

    monkeypatch.setattr(compare, "_start", begun)
    assert run_side_by_side([small_config(tmp_path)], interrupt) is None


def test_force_reaches_the_runs_of_a_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []
    monkeypatch.setattr(compare, "compare", lambda *arguments: given.append(arguments[-1]))
    for words in ([], ["--force"]):
        assert main(["train", "quickstart", f"run.dir={tmp_path}/run", *words]) == 0
    assert given == [False, True]
    monkeypatch.setattr(subprocess, "Popen", lambda words, **_: given.append(words[4:]))
    compare._start(override(Config(), [f"run.dir={tmp_path}/run"]), 1, force=True)
    assert given[2] == [f"{tmp_path}/run/config.yaml", "--force"]


@pytest.mark.parametrize("error", [RunAlarm, NonFiniteError, NoSignalError])
def test_on_several_ranks_a_run_that_ends_early_ends_no_other(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ending:
        def __init__(self, config: Config, _: object) -> None:
            self.config = config

        def run(self, _: object) -> bool:
            if self.config.run.dir.endswith("first"):
                raise error("it ended early")
            return True

    monkeypatch.setattr(compare, "Trainer", Ending)
    configs = [override(Config(), [f"run.dir={tmp_path}/{name}"]) for name in ("first", "second")]
    ranks = SimpleNamespace(is_first=True)
    failed = compare._one_after_another(configs, ranks, Interrupt())  # type: ignore[arg-type]
    assert failed == {f"{tmp_path.name}/first": "it ended early"}


def compared(directory: Path, losses: str, *overrides: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "megatron_stare", "compare", "quickstart", "--losses", losses]
    done = subprocess.run(
        [*command, "--seeds", "0", f"run.dir={directory}", *SHORT, *overrides],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_comparison_is_complete_if_a_run_ended_early(tmp_path: Path) -> None:
    arm = f"compare.arms.lost=[{','.join(['loss.name=dapo', *LOST])}]"
    said = compared(tmp_path / "run", "lost,stare", arm, code=2)
    assert "Seconds per step" in said and "report.html" in said
    assert "error: 1 of 2 runs ended early, the first: seed0/lost: error: only 0 of" in said
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["runs"]["stare"]["steps"] == 2 and summary["runs"]["lost"]["steps"] == 1
    assert summary["caveats"][-1].startswith("seed0/lost ended at step 1: error: only 0 of")


@pytest.mark.slow
def test_the_command_trains_every_loss_and_takes_another_one_later(tmp_path: Path) -> None:
    """From one cold start; what was trained is not trained again."""
    assert "report:" in compared(tmp_path / "run", "gspo")
    files = {name: tmp_path / f"run/seed0/{name}/metrics.jsonl" for name in ("gspo", "stare")}
    before = files["gspo"].read_bytes()
    compared(tmp_path / "run", "gspo,stare")
    assert files["gspo"].read_bytes() == before
    first = [read_metrics(file)[0] for file in files.values()]
    for key in ("reward", "response_length", "signal_fraction"):
        assert first[0][key] == first[1][key], "one start, one set of random numbers"
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert set(summary["runs"]) == {"gspo", "stare"}
    for run in summary["runs"].values():
        assert run["steps"] == 2 and run["length_final"] > 0 and run["seconds_per_step"] > 0
    assert "Seconds per step" in (tmp_path / "run/report.html").read_text()


def test_the_note_on_inactive_clipping_is_true() -> None:
    quickstart = find_recipe("quickstart")
    assert caveats(quickstart)[-1] == ONE_STEP
    for several in ("train.num_steps_per_rollout=4", "train.epochs=2"):
        assert caveats(override(quickstart, [several])) == caveats(quickstart)[:-1]


def test_an_arm_keeps_no_setting_of_the_loss_that_only_others_read(tmp_path: Path) -> None:
    config = between_losses(
        override(small_config(tmp_path), ["loss.name=stare", "loss.reweight_w=1.4"]),
        ["stare", "dapo"],
    )
    arms = {name: _arm_config(config, name, "model", tmp_path) for name in ("stare", "dapo")}
    assert [arms[name].loss.reweight_w for name in ("stare", "dapo")] == [1.4, 1.1]
    own = {**config.compare.arms, "dapo": ["loss.name=dapo", "loss.reweight_w=1.3"]}
    named = dataclasses.replace(config, compare=dataclasses.replace(config.compare, arms=own))
    with pytest.raises(UserError, match=r"loss.reweight_w=1.3 has no effect: the objective dapo"):
        objective_of(_arm_config(named, "dapo", "model", tmp_path).loss)


def test_an_arm_keeps_no_setting_that_only_other_arms_read(tmp_path: Path) -> None:
    arms = {"whole": [], "rank": ["adapters.rank=2"], "own": ["adapters.alpha=8"]}
    shared = ["adapters.merge=false", "adapters.alpha=8", "mismatch.correction=token_tis"]
    several = dataclasses.replace(small_config(tmp_path).compare, arms=arms)
    config = override(
        dataclasses.replace(small_config(tmp_path), compare=several), [*shared, "mismatch.upper=3"]
    )
    whole, rank = (_arm_config(config, name, "model", tmp_path) for name in ("whole", "rank"))
    assert (whole.adapters.merge, whole.adapters.alpha) == (True, 32)
    assert (rank.adapters.merge, rank.adapters.alpha) == (False, 8)
    assert whole.mismatch.upper == rank.mismatch.upper == 3
    with pytest.raises(UserError, match=r"adapters.alpha=8.0 has no effect without adapters.rank"):
        _arm_config(config, "own", "model", tmp_path)
