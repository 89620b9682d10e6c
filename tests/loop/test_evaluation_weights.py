"""Responses are found again for the same weights only, whatever the step is called."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_stare import generate, load_config
from megatron_stare.__main__ import main
from megatron_stare.collect.journal import MAGIC
from megatron_stare.config import dump
from megatron_stare.policy import runtime
from tests.small_run import rows_of, small_config

runtime.prepare()  # before anything of megatron.core

from megatron.core import distributed  # noqa: E402
from megatron.core import optimizer as megatron_optimizer  # noqa: E402

WRAPPER = "DistributedDataParallel"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A run that saves every step; its held-out problems lie in a file of their own."""
    config = small_config(
        tmp_path,
        "run.save_interval=1",
        "run.keep_last=3",
        "evaluation.n_samples_per_eval_prompt=2",
        f"evaluation.eval_data.held={tmp_path / 'held.jsonl'}",
    )
    rows = (tmp_path / "problems.jsonl").read_text().splitlines()[:9]
    (tmp_path / "held.jsonl").write_text("".join(f"{row}\n" for row in rows))
    dump(config, tmp_path / "recipe.yaml")
    return tmp_path / "recipe.yaml"


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """The number of optimizers and gradient buffers built so far."""
    built: list[str] = []
    for module, name in ((megatron_optimizer, "get_megatron_optimizer"), (distributed, WRAPPER)):
        real = getattr(module, name)

        def counted(*args: Any, real: Any = real, name: str = name, **options: Any) -> Any:
            built.append(name)
            return real(*args, **options)

        monkeypatch.setattr(module, name, counted)
    return lambda: len(built)


def evaluated(run: Path, *words: str, step: int = 3) -> list[dict]:
    assert main(["evaluate", str(run), *words]) == 0
    assert json.loads((run / "evaluation.json").read_text())["step"] == step
    lines = (run / "evaluation/problems.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def caches(run: Path) -> dict[str, int]:
    """Directory of responses -> how many lie there."""
    return {
        folder.name: sum(file.read_bytes().count(MAGIC) for file in folder.glob("*/*.frames"))
        for folder in run.glob("evaluation/held-*")
    }


def test_weights_retrained_from_an_older_checkpoint_are_evaluated_again(
    tmp_path: Path, recipe: Path, trained: Callable[[], int]
) -> None:
    run = tmp_path / "run"
    assert main(["train", str(recipe)]) == 0
    assert trained() == 2
    first = evaluated(run)
    assert trained() == 2, "evaluate needs neither optimizer nor gradient buffers"
    assert list(caches(run).values()) == [18]
    # Trained again from step 1, the same way: the same weights, and nothing is sampled.
    assert main(["train", str(recipe), "--load", "step_00000001"]) == 0
    assert evaluated(run) == first
    assert list(caches(run).values()) == [18]
    # Again, at another learning rate: step 3 once more, of the same run, with other weights.
    assert main(["train", str(recipe), "--load", "step_00000001", "optimizer.lr=1e-2"]) == 0
    again = evaluated(run)
    assert sorted(caches(run).values()) == [18, 18], "the older responses stay where they are"
    assert [row["prompt"] for row in again] == [row["prompt"] for row in first]
    assert again != first


def test_an_older_checkpoint_is_evaluated_by_name_and_no_result_is_removed(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(recipe)]) == 0
    run = recipe.with_name("run")
    newest = evaluated(run)
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    older = evaluated(run, "--load", "step_00000001", step=1)
    assert [row["prompt"] for row in older] == [row["prompt"] for row in newest]
    assert older != newest
    assert sorted(caches(run).values()) == [18, 18], "each policy has responses of its own"
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == names
    assert evaluated(run) == newest
    (group,) = generate(load_config(run), ["1+2="], load="step_00000001")
    assert group.rollouts[0].weight_version == 1
    assert main(["evaluate", str(run), "--load", "step_00000007"]) == 2
    assert "--load step_00000007: not in" in capsys.readouterr().err


def test_the_start_is_evaluated_once_and_changes_no_step(recipe: Path) -> None:
    plain, asked = (recipe.with_name(name) for name in ("plain", "asked"))
    assert main(["evaluate", str(recipe), f"run.dir={plain}"]) == 0
    start = json.loads((plain / "evaluation.json").read_text())
    assert start.pop("step") == 0
    assert main(["train", str(recipe), f"run.dir={plain}"]) == 0
    words = (f"run.dir={asked}", "evaluation.eval_at_start=true")
    assert main(["train", str(recipe), "train.num_rollout=1", *words]) == 0
    assert main(["train", str(recipe), *words]) == 0
    first, *others = rows_of(load_config(asked))
    found = {key: first.pop(key) for key in [*first] if key.startswith("eval")}
    assert found == {key.replace("eval/", "eval_start/"): value for key, value in start.items()}
    assert not any(key.startswith("eval") for row in others for key in row)
    assert [first, *others] == rows_of(load_config(plain))


def test_a_changed_model_directory_is_another_policy(tmp_path: Path, recipe: Path) -> None:
    run = tmp_path / "run"
    arguments = ["evaluate", str(recipe)]
    assert main(arguments) == main(arguments) == 0
    assert list(caches(run).values()) == [18]
    file = tmp_path / "model/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_theta": 500.0}))
    assert main(arguments) == 0
    assert sorted(caches(run).values()) == [18, 18]
