"""The quickstart as a newcomer starts it, shortened: cold start, both arms, summary, report;
on two ranks too.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_stare.reporting.logbook import read_metrics
from tests.forked import Command
from tests.small_run import without_seconds

SHORT = (
    "train.num_rollout=3",
    "cold_start.steps=6",
    "rollout.rollout_batch_size=4",
    "scoring.reward=tests.rewards.even_characters",
    "evaluation.eval_interval=3",
    "evaluation.n_samples_per_eval_prompt=2",
)
KEYS = (
    "entropy_initial",
    "entropy_final",
    "entropy_in_band_fraction",
    "train_reward_final",
    "eval/heldout_hard/avg_at_k",
    "eval/heldout_hard/pass_at_k",
    "eval/heldout_easy/avg_at_k",
    "steps",
    "seconds",
)


def quickstart(directory: Path, *options: str, launcher: tuple[str, ...] = ()) -> str:
    words = [*launcher, "-m", "megatron_stare", "train", "quickstart", f"run.dir={directory}"]
    done = Command([*words, *SHORT, *options], directory.parent / "said.txt")
    assert done.wait(600) == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("quickstart") / "run"
    quickstart(directory)
    return directory


def test_summary_and_report_are_written(alone: Path) -> None:
    summary = json.loads((alone / "summary.json").read_text())
    assert summary["seed"] == 0
    assert set(summary["runs"]) == {"grpo_ds", "stare"}
    for run in summary["runs"].values():
        assert set(KEYS) <= set(run) and run["target_entropy"] == 0.3
        assert run["steps"] == 3 and run["eval/heldout_hard/k"] == 2
    page = (alone / "report.html").read_text(encoding="utf-8")
    for figure in ("Policy entropy", "Training reward", "pass@2"):
        assert figure in page


def test_both_arms_start_from_the_same_policy_and_rollouts(alone: Path) -> None:
    first = {
        arm: read_metrics(alone / f"seed0/{arm}/metrics.jsonl")[0] for arm in ("grpo_ds", "stare")
    }
    for key in ("entropy", "reward", "response_length", "surprisal"):
        assert first["grpo_ds"][key] == first["stare"][key], key


@pytest.mark.slow
def test_a_second_run_changes_nothing_and_more_steps_continue_it(alone: Path) -> None:
    before = {file: file.read_bytes() for file in alone.glob("seed0/*/metrics.jsonl")}
    assert "STARE" in quickstart(alone)
    assert {file: file.read_bytes() for file in alone.glob("seed0/*/metrics.jsonl")} == before
    quickstart(alone, "train.num_rollout=4")
    for file, content in before.items():
        assert file.read_bytes().startswith(content)
        assert read_metrics(file)[-1]["step"] == 4


@pytest.mark.slow
def test_two_seeds_on_four_ranks_match_one_process(alone: Path, tmp_path: Path) -> None:
    """torchrun with TP=2 x PP=2: the same cold start and arms,
    run one after the other on all ranks.
    """
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "4")
    sizes = ("policy.tensor_model_parallel_size=2", "policy.pipeline_model_parallel_size=2")
    quickstart(tmp_path / "run", *sizes, "--seeds", "0,1", launcher=torchrun)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert set(summary["seeds"]) == {"0", "1"}
    for arm in ("grpo_ds", "stare"):
        ours, theirs = (
            without_seconds(read_metrics(directory / f"seed0/{arm}/metrics.jsonl"))[0]
            for directory in (tmp_path / "run", alone)
        )
        for key in ("loss", "grad_norm", "entropy", "reward", "response_length"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-6), key
