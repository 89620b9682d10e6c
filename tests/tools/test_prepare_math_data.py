"""tools/prepare_math_data.py: a few rows in each published layout, and the shared DAPO file."""

import json
import runpy

import pyarrow
import pyarrow.parquet
import pytest

from megatron_stare.config import DataConfig
from megatron_stare.data.prompts import load_prompts
from megatron_stare.data.rows import Dropped, read_rows
from tests.paths import MATH, ROOT
from tests.tiny_models import byte_tokenizer

TOOL = runpy.run_path(str(ROOT / "tools" / "prepare_math_data.py"))
FRAME = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the "
    "problem.\n\n{}\n\nRemember to put your answer on its "
    'own line after "Answer:".'
)


def verl(question, truth, **info):
    return {
        "data_source": "d",
        "prompt": [{"content": question, "role": "user"}],
        "ability": "math",
        "reward_model": {"ground_truth": truth, "style": "rule"},
        "extra_info": info,
    }


def parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.fixture
def published(tmp_path):
    """The four layouts; every data set but the first repeats a problem of one before it."""
    failures = {"DeepSeek-R1-Distill-Qwen-1.5B": 16, "DeepSeek-R1-Distill-Qwen-7B": 4}
    dapo = [verl(FRAME.format("What is $2+2$?"), "4", index="a")] * 3
    dapo.append(verl(FRAME.format("Let $x=1$.\n\nWhat is $x$?"), "1", index="b"))
    deepscaler = [
        {"problem": "What is $2 + 2$?", "answer": "4", "solution": "4"},
        {"problem": "What is $3^2$?", "answer": "9", "solution": ""},
        {"problem": "Unanswered", "answer": "", "solution": ""},
    ]
    skywork = [
        verl("What is $5-1$?", '["4"]', index=0, model_difficulty=failures),
        verl("Give $x$ and $y$.", '["1", "2"]', index=1, model_difficulty=failures),
        verl("What is  $3^2$?", '["81"]', index=2, model_difficulty=failures),
    ]
    polaris = [
        {"problem": "What is $6/2$?", "answer": "3", "difficulty": "2/8"},
        {"problem": "Held out problem, what is it?", "answer": "3", "difficulty": "7/8"},
    ]
    (tmp_path / "deepscaler.json").write_text(json.dumps(deepscaler))
    (tmp_path / "polaris.jsonl").write_text("".join(json.dumps(row) + "\n" for row in polaris))
    (tmp_path / "held.jsonl").write_text(
        json.dumps({"prompt": "held out problem, what is it?", "label": "3"})
    )
    return [
        f"dapo={parquet(tmp_path / 'dapo.parquet', dapo)}",
        f"deepscaler={tmp_path / 'deepscaler.json'}",
        f"skywork={parquet(tmp_path / 'skywork.parquet', skywork)}",
        f"polaris={tmp_path / 'polaris.jsonl'}",
        "--evaluation",
        str(tmp_path / "held.jsonl"),
    ]


def test_the_four_layouts(published, tmp_path, capsys):
    output = tmp_path / "math.jsonl"
    assert TOOL["main"]([*published, "--output", str(output)]) == 0
    rows = {row.question: row for row in read_rows(str(output), DataConfig(), Dropped())}
    suffix = "\n\n" + TOOL["INSTRUCTION"]
    assert {
        question.removesuffix(suffix): (row.label, row.metadata["data_source"])
        for question, row in rows.items()
    } == {
        "What is $2+2$?": ("4", "dapo"),
        "Let $x=1$.\n\nWhat is $x$?": ("1", "dapo"),
        "What is $3^2$?": ("9", "deepscaler"),
        "What is $5-1$?": ("4", "skywork"),
        "What is $6/2$?": ("3", "polaris"),
    }
    rates = {row.metadata["data_source"]: row.metadata.get("pass_rates") for row in rows.values()}
    assert rates["skywork"] == {
        "DeepSeek-R1-Distill-Qwen-1.5B": 0.0,
        "DeepSeek-R1-Distill-Qwen-7B": 0.75,
    }
    assert rates["polaris"] == {"DeepSeek-R1-Distill-Qwen-7B": 0.25}
    prompts, dropped = load_prompts(str(output), byte_tokenizer(), DataConfig())
    assert len(prompts) == 5 and dropped.total == 0
    assert "written" in capsys.readouterr().out


def test_every_row_is_accounted_for(published, tmp_path):
    sources = [TOOL["_source"](text) for text in published[:4]]
    counts = TOOL["prepare"](sources, tmp_path / "math.jsonl", [published[-1]], 0)
    assert {name: dict(count) for name, count in counts.items()} == {
        "dapo": {"rows": 4, "kept": 2, "duplicate": 2},
        "deepscaler": {"rows": 3, "kept": 1, "duplicate": 1, "no problem or answer": 1},
        "skywork": {"rows": 3, "kept": 1, "several answers": 1, "duplicate with another label": 1},
        "polaris": {"rows": 2, "kept": 1, "in the evaluation data": 1},
    }


def test_the_seed_decides_the_order(published, tmp_path):
    def written(seed):
        assert (
            TOOL["main"]([*published, "--output", str(tmp_path / "out.jsonl"), "--seed", str(seed)])
            == 0
        )
        return (tmp_path / "out.jsonl").read_text()

    assert written(1) == written(1)
    assert len({written(seed) for seed in range(4)}) > 1


@pytest.mark.parametrize(
    ("source", "words"), [("gsm=a.jsonl", "LAYOUT=SOURCE"), ("dapo=none.parquet", "not exist")]
)
def test_bad_arguments_are_one_line(source, words, tmp_path, capsys):
    assert TOOL["main"]([source, "--output", str(tmp_path / "out.jsonl")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and words in error
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not MATH.is_dir(), reason="no ../shared/data/math here")
def test_the_shared_dapo_rows(tmp_path):
    evaluation = [
        str(MATH / f"{name}.parquet") for name in ("aime24", "aime25", "amc23", "math500")
    ]
    sources = [("dapo", str(MATH / "dapo17k_first2000.parquet"))]
    count = TOOL["prepare"](sources, tmp_path / "math.jsonl", evaluation, 0)["dapo"]
    assert count["rows"] == 2000 == count.total() - count["rows"]
    assert count["kept"] > 1900 and count["no problem or answer"] == 0
    for row in read_rows(str(tmp_path / "math.jsonl"), DataConfig(), Dropped()):
        assert TOOL["DAPO_BEGIN"] not in row.question and TOOL["DAPO_END"] not in row.question
