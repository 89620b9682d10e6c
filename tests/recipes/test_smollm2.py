"""The recipe of a pretrained language model, with a tiny random model of its shape."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_stare.__main__ import main
from megatron_stare.compare import compare
from megatron_stare.config import differences, override
from megatron_stare.losses import objective_of
from megatron_stare.recipes import find_recipe
from megatron_stare.recipes.smollm2 import ADAPTED, TEACHER
from megatron_stare.reporting.logbook import read_metrics
from tests.forked import start_arm
from tests.tiny_models import byte_tokenizer, tiny_config, write_checkpoint

RECIPES = ("smollm2_135m", pytest.param("smollm2_135m_lcm", marks=pytest.mark.slow))


@pytest.fixture(scope="module", autouse=True)
def forked() -> Iterator[None]:
    """Runs start forked; tests/recipes/test_quickstart.py starts them as users do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "_start", start_arm)
        yield


@pytest.fixture(scope="module", params=RECIPES)
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both arms, with a cold start of four steps: the answers of a model that size are guesses."""
    directory = tmp_path_factory.mktemp("smollm2")
    shape = {"vocab_size": 257, "max_position_embeddings": 512, "eos_token_id": 256}
    config = tiny_config("llama", **shape, tie_word_embeddings=True)
    model = write_checkpoint(directory / "model", config)
    byte_tokenizer().save_pretrained(model)
    assert main(["train", request.param, *options_of(model, directory / "run")]) == 0
    return directory / "run"


def options_of(model: Path, run: Path) -> list[str]:
    options = [f"policy.hf_checkpoint={model}", f"run.dir={run}"]
    options += ["data.rollout_max_prompt_len=160", "rollout.rollout_max_response_len=16"]
    options += ["cold_start.steps=4", "train.num_rollout=2", "rollout.dynamic_sampling=false"]
    options += ["scoring.verifier_processes=1"]  # each imports its library for a second
    return [*options, "evaluation.eval_interval=0"]


def test_both_arms_train_from_one_cold_start(finished: Path) -> None:
    for arm in ("grpo_ds", "stare"):
        rows = read_metrics(finished / "seed0" / arm / "metrics.jsonl")
        assert [row["step"] for row in rows] == [1, 2]
        assert all(0 <= row["reward/reasoning_gym"] <= 1 for row in rows)
    summary = json.loads((finished / "summary.json").read_text())
    assert {"grpo_ds", "stare"} <= set(summary["runs"])
    assert (finished / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("finished", ["smollm2_135m"], indirect=True)
def test_an_arm_learns_from_the_weights_of_another(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished.parent)
    arm = str(finished / "seed0" / "grpo_ds")
    assert main(["convert", "megatron-to-hf", arm, TEACHER]) == 0
    # No response of that model is right: its arm kept the weights that the student starts with.
    assert distances(finished.parent, "of_the_arm") == pytest.approx([0.0, 0.0], abs=1e-5)


@pytest.mark.parametrize("finished", ["smollm2_135m"], indirect=True)
def test_the_distilled_arm_reads_its_teacher(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The teacher is the model before the cold start, so it differs from the student."""
    monkeypatch.chdir(finished.parent)
    shutil.rmtree(TEACHER, ignore_errors=True)  # another test's
    shutil.copytree("model", TEACHER)
    assert min(map(abs, distances(finished.parent, "of_the_model"))) > 1e-4


def distances(directory: Path, run: str) -> list[float]:
    """The students' distance from TEACHER in two steps."""
    options = options_of(directory / "model", directory / run)
    assert main(["compare", "smollm2_135m", *options, "--losses", "distilled"]) == 0
    rows = read_metrics(directory / run / "seed0" / "distilled" / "metrics.jsonl")
    return [row["reference_kl"] for row in rows]


def test_every_arm_is_valid_and_adapted_ones_only_add_adapters() -> None:
    """Arms with adapters name their rank and learning rate."""
    config = find_recipe("smollm2_135m")
    runs = {name: override(config, words) for name, words in config.compare.arms.items()}
    assert all(objective_of(run.loss) for run in runs.values())
    for name in ADAPTED:
        arm, _, rank = name.partition("_rank")
        changed = {key for key, _, _ in differences(runs[arm], runs[name])}
        assert changed <= {"adapters.rank", "optimizer.lr"}
        assert runs[name].adapters.rank == int(rank.removesuffix("_1x"))
        ratio = runs[name].optimizer.lr / runs[arm].optimizer.lr
        assert ratio == pytest.approx(1 if name.endswith("_1x") else 10)
