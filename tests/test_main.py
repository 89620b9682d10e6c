"""The command line in process: bad input is one line and exit code 2; real rows train;
evaluate and report work.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megatron_stare.__main__ import main
from megatron_stare.config import dump
from megatron_stare.reporting.logbook import read_metrics
from tests.paths import MATH
from tests.small_run import small_config
from tests.tiny_models import byte_tokenizer, tiny_config, write_checkpoint


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    """A config.yaml of the small run."""
    path = tmp_path / "small.yaml"
    dump(small_config(tmp_path), path)
    return str(path)


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def break_truncate(tmp_path: Path) -> None:
    file = tmp_path / "model/model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])


def break_missing_tensor(tmp_path: Path) -> None:
    file = tmp_path / "model/model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})


def break_row(tmp_path: Path) -> None:
    with (tmp_path / "problems.jsonl").open("a") as file:
        file.write("{not json\n")


BAD_INPUT: dict[str, tuple] = {
    "no server": (["serve", "{recipe}", "sglang.command=/no/such/server"], "cannot be started"),
    "server ends": (["serve", "{recipe}", "sglang.command=/bin/false"], "ended while starting"),
    "no checkpoint": (
        ["train", "{recipe}", "policy.hf_checkpoint="],
        "policy.hf_checkpoint is empty",
    ),
    "pipeline size over world": (
        ["train", "{recipe}", "policy.pipeline_model_parallel_size=2"],
        "= 2 does not divide the 1",
    ),
    "virtual stages alone": (
        ["train", "{recipe}", "policy.virtual_pipeline_model_parallel_size=2"],
        "needs policy.pipeline_model_parallel_size above 1",
    ),
    "sequence parallelism alone": (
        ["train", "{recipe}", "policy.sequence_parallel=true"],
        "set it to false",
    ),
    "fp8 without a GPU": (
        ["train", "{recipe}", "policy.fp8=hybrid"],
        "needs TransformerEngine and a GPU",
    ),
    "sequence scope over context ranks": (
        ["train", "{recipe}", "loss.scope=sequence", "policy.context_parallel_size=2"],
        "loss.scope=sequence",
    ),
    "budget below lengths": (
        ["train", "{recipe}", "policy.max_tokens_per_gpu=20"],
        "exceed policy.max_tokens_per_gpu=20",
    ),
    "warm-up over decay": (
        ["train", "{recipe}", "optimizer.lr_warmup_iters=9", "optimizer.lr_decay_iters=9"],
        "lower it",
    ),
    "nothing to evaluate": (["evaluate", "{recipe}"], "evaluation.eval_data is empty"),
    "no report": (["report", "{tmp_path}"], "holds neither"),
}

BAD_FILES = {
    "config disagrees": (
        lambda p: edit_json(
            p / "model/config.json", num_hidden_layers=1, layer_types=["full_attention"]
        ),
        "num_hidden_layers=1 but the weights have 2",
    ),
    "config contradicts itself": (
        lambda p: edit_json(p / "model/config.json", num_hidden_layers=1),
        "num_hidden_layers",
    ),
    "wrong width": (
        lambda p: edit_json(p / "model/config.json", intermediate_size=40),
        "intermediate_size=40 but the weights have",
    ),
    "truncated weights": (break_truncate, "is damaged"),
    "missing tensor": (break_missing_tensor, "model.norm.weight is missing"),
    "unreadable row": (break_row, "problems.jsonl, row 37: is not a JSON object"),
}


def assert_one_line_error(capfd: pytest.CaptureFixture[str], code: int, words: str) -> None:
    error = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error")]
    assert code == 2
    assert len(error) == 1 and words in error[0], error


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_exit_code_2(
    case: str, tmp_path: Path, recipe: str, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments, words = BAD_INPUT[case]
    code = main([argument.format(recipe=recipe, tmp_path=tmp_path) for argument in arguments])
    assert_one_line_error(capfd, code, words)
    assert not list(tmp_path.glob("run/checkpoints/*"))


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_one_line_and_exit_code_2(
    case: str, tmp_path: Path, recipe: str, capfd: pytest.CaptureFixture[str]
) -> None:
    spoil, words = BAD_FILES[case]
    spoil(tmp_path)
    assert_one_line_error(capfd, main(["train", recipe]), words)


def test_train_then_evaluate_then_report(
    tmp_path: Path, recipe: str, capfd: pytest.CaptureFixture[str]
) -> None:
    data = f"evaluation.eval_data.held={tmp_path / 'problems.jsonl'}"
    assert (
        main(
            [
                "train",
                recipe,
                data,
                "evaluation.eval_interval=3",
                "evaluation.n_samples_per_eval_prompt=4",
            ]
        )
        == 0
    )
    during = read_metrics(tmp_path / "run/metrics.jsonl")[-1]
    assert main(["evaluate", str(tmp_path / "run")]) == 0
    after = json.loads((tmp_path / "run/evaluation.json").read_text())
    assert after["step"] == 3
    for key in ("avg_at_k", "pass_at_k", "k"):
        assert after[f"eval/held/{key}"] == pytest.approx(during[f"eval/held/{key}"]), (
            "the checkpoint is the policy"
        )
    assert 0 < after["eval/held/avg_at_k"] < 1
    assert main(["report", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run/report.html").stat().st_size > 10_000
    assert "report.html" in capfd.readouterr().out


def test_overrides_may_follow_options(recipe: str, capfd: pytest.CaptureFixture[str]) -> None:
    code = main(["train", recipe, "--seeds", "0", "optimizer.lr=fast"])
    assert_one_line_error(capfd, code, "optimizer.lr=fast")
    with pytest.raises(SystemExit) as exit_info:
        main(["train", recipe, "--seed", "0", "--no-such-option"])
    assert exit_info.value.code == 2


@pytest.mark.skipif(not MATH.is_dir(), reason="the shared problem sets are not here")
def test_real_rows_through_the_short_cot_recipe(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = write_checkpoint(
        tmp_path / "model",
        tiny_config("qwen2", vocab_size=257, eos_token_id=0, max_position_embeddings=4096),
    )
    byte_tokenizer().save_pretrained(model)
    arguments = [
        f"policy.hf_checkpoint={model}",
        f"data.prompt_data={MATH / 'dapo17k_first2000.parquet'}",
        f"evaluation.eval_data.aime24={MATH / 'aime24.parquet'}",
        f"run.dir={tmp_path / 'run'}",
        "data.rollout_max_prompt_len=900",
        "data.on_bad_row=skip",
        "policy.tensor_model_parallel_size=1",
        "policy.sequence_parallel=false",
        "rollout.engine=embedded",
        "policy.dtype=fp32",
        "rollout.rollout_batch_size=4",
        "rollout.over_sampling_batch_size=4",
        "rollout.n_samples_per_prompt=2",
        "rollout.rollout_max_response_len=40",
        "rollout.dynamic_sampling=false",
        "evaluation.eval_interval=3",
        "evaluation.n_samples_per_eval_prompt=1",
        "train.num_rollout=3",
    ]
    assert main(["train", "short_cot_7b", *arguments]) == 0
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["reward"] == 0 and row["signal_fraction"] == 0 and row["skipped"] == 1
        assert row["sequences"] == 8
        assert row["loss_tokens"] == pytest.approx(8 * row["response_length"]), (
            "only response tokens are loss tokens"
        )
        assert 0 < row["entropy"] < 5.6 and row["logprob_diff_max"] < 1e-4
        assert row["gate"] == float(row["entropy"] < 0.3)
    assert rows[-1]["eval/aime24/avg_at_k"] == 0
    assert re.search(r"\d+ rows skipped", capfd.readouterr().out)
