"""The Python interface: from a script, and from a thread that is not the main one."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import megatron_stare
from megatron_stare import evaluate, generate, load_config, train
from megatron_stare.config import Config, OptimizerConfig, PolicyConfig, UserError, dump
from megatron_stare.loop import run_directory
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.run_directory import locked
from megatron_stare.policy import topology
from tests.paths import ROOT
from tests.small_run import rows_of, small_config

SCRIPT = """
import sys
import megatron_stare
assert "torch" not in sys.modules and "megatron_stare.config" not in sys.modules
from megatron_stare import evaluate, generate, load_config, train
assert "torch" not in sys.modules

config = load_config(sys.argv[1], {"run.dir": sys.argv[2], "train.num_rollout": 2})
result = train(config)
rows = result.metrics()
print(result.complete, [row["step"] for row in rows], rows[-1]["entropy"] > 0)
measured = evaluate(load_config(result.directory, {"evaluation.eval_data.sums": sys.argv[3]}))
print(measured.metrics["step"], len(measured.problems["sums"]), [f.name for f in measured.files])
"""


def in_thread(work):
    """The result of `work` in another thread than the main one, or its exception."""
    outcome = []

    def run():
        try:
            outcome.append(work())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def test_a_script_trains_and_evaluates(tmp_path):
    config = small_config(tmp_path, "rollout.rollout_max_response_len=4")
    dump(config, tmp_path / "run.yaml")
    problems = (tmp_path / "problems.jsonl").read_text().splitlines()[:3]
    (tmp_path / "held_out.jsonl").write_text("\n".join(problems))
    files = [tmp_path / "run.yaml", tmp_path / "mine", tmp_path / "held_out.jsonl"]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, files)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "True [1, 2] True",
        "2 3 ['evaluation.json', 'problems.jsonl']",
    ]


def test_training_in_a_thread_equals_training_in_the_main_thread(tmp_path):
    here = small_config(tmp_path / "main")
    there = small_config(tmp_path / "thread")
    assert train(here).complete
    assert in_thread(lambda: train(there)).complete
    assert rows_of(here) == rows_of(there)


def test_an_interrupt_ends_a_run_in_a_thread_and_the_same_call_continues_it(tmp_path):
    config = small_config(tmp_path, "train.num_rollout=3")
    interrupt = Interrupt()
    interrupt.ask()
    stopped = in_thread(lambda: train(config, interrupt=interrupt))
    assert not stopped.complete
    with pytest.raises(UserError, match=r"metrics.jsonl does not exist; run must be one of"):
        stopped.metrics("seed0/stare")
    finished = train(config)
    assert finished.complete and [row["step"] for row in finished.metrics()] == [1, 2, 3]


@pytest.mark.parametrize("held", [True, False])
def test_one_of_two_starts_of_a_run_holds_it_before_a_file_is_changed_or_a_part_is_built(
    held: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one's servers would take the first one's GPUs."""
    config, run = small_config(tmp_path, "train.num_rollout=1"), tmp_path / "run"
    monkeypatch.setattr(run_directory, "LOCK_PATIENCE_SECONDS", 0.0)

    def second(*_: object) -> None:
        assert not held, "the first start builds its engine"
        with locked(run):
            pass

    monkeypatch.setattr("megatron_stare.loop.assemble.build_engine", second)
    first = locked(run) if held else contextlib.nullcontext()
    with first, pytest.raises(UserError, match="another process is training"):
        train(config)
    assert not (run / "config.yaml").exists()
    with locked(run):  # the end of the call has given it back
        assert (run / "prompts.json").exists() != held


def test_generate_repeats_itself_and_keeps_the_order(tmp_path):
    config = small_config(tmp_path, "rollout.rollout_max_response_len=6")
    groups = generate(config, ["1+1=", "2+2="], n=3)
    assert [group.prompt.text for group in groups] == ["1+1=", "2+2="]
    assert [len(group.rollouts) for group in groups] == [3, 3]
    assert len({rollout.text for group in groups for rollout in group.rollouts}) > 1
    assert groups == generate(config, ["1+1=", "2+2="], n=3)
    alone = in_thread(lambda: generate(config, ["1+1="], n=1, temperature=0.0, max_new_tokens=2))
    assert len(alone[0].rollouts[0].response_ids) <= 2


def test_a_text_of_rollout_stop_ends_a_response_and_stays_in_it(tmp_path):
    config = small_config(tmp_path, "rollout.rollout_max_response_len=24")
    (free,) = generate(config, ["1+1="], n=16)
    stop = "".join(rollout.text for rollout in free.rollouts)[5]
    ended = small_config(
        tmp_path, "rollout.rollout_max_response_len=24", f"rollout.stop=['{stop}']"
    )
    (group,) = generate(ended, ["1+1="], n=16)
    stopped = 0
    for rollout, whole in zip(group.rollouts, free.rollouts, strict=True):
        if stop in whole.text:
            assert rollout.text == whole.text[: whole.text.index(stop) + 1]
            assert rollout.status == "completed"
            stopped += 1
        else:
            assert rollout.text == whole.text
    assert stopped > 0
    with pytest.raises(UserError, match=r"rollout.stop has an empty text"):
        small_config(tmp_path, "rollout.stop=['']")
    thinks = small_config(tmp_path, "data.chat_template_kwargs={enable_thinking: false}")
    with pytest.raises(UserError, match="the chat template does not read it"):
        generate(thinks, ["1+1="])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"n": 0}, "n=0 must be 1 or more"),
        ({"temperature": -1.0}, "temperature=-1.0"),
    ],
)
def test_generate_refuses_settings_by_name(tmp_path, wrong, message):
    with pytest.raises(UserError, match=message):
        generate(small_config(tmp_path), ["1+1="], **wrong)


def test_generate_names_the_prompt_that_it_refuses(tmp_path):
    messages = [{"role": "user", "content": "1+1="}]
    config = small_config(tmp_path, "data.apply_chat_template=false")
    with pytest.raises(UserError, match=r"prompt 1: .*apply_chat_template is false"):
        generate(config, ["1+1=", messages])


def test_overrides_are_values_or_the_words_of_the_command_line(tmp_path):
    values = {
        "optimizer.lr": 1e-6,
        "run.dir": tmp_path,
        "rollout.stop": ["a", "#"],
        "data.system_prompt": "answer after #### \U0001f600",
        "scoring.rewards": {"math": 1.0},
        "loss.adaptive": True,
        "scoring.reward": "",
    }
    config = load_config("short_cot_7b", values)
    assert config.optimizer.lr == 1e-6 and config.run.dir == str(tmp_path)
    assert config.rollout.stop == ["a", "#"] and config.scoring.rewards == {"math": 1.0}
    assert config.data.system_prompt == "answer after #### \U0001f600"
    words = [f"run.dir={tmp_path}", "optimizer.lr=1e-6", "rollout.stop=[a, '#']"]
    words += ["data.system_prompt=answer after #### \U0001f600"]
    words += ["scoring.rewards={math: 1.0}", "loss.adaptive=true", "scoring.reward="]
    assert load_config("short_cot_7b", words) == config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("optimizer.lr=1", r"must be a list of settings"),
        ({"optimizer.lr": object()}, r"optimizer.lr=<object .* is not a value of a setting"),
        ({"optimizer.rate": 1}, r"optimizer.rate"),
        ({"optimizer.lr": "fast"}, r"optimizer.lr"),
    ],
)
def test_wrong_overrides_are_refused_by_name(overrides, message):
    with pytest.raises(UserError, match=message):
        load_config("quickstart", overrides)


def test_an_override_without_effect_on_an_arm_is_refused():
    with pytest.raises(UserError, match="changes nothing in arm"):
        load_config("quickstart", {"loss.name": "gspo"})


@pytest.mark.parametrize("word", ["compare.seeds=[0,1]", "compare.run=[a]"])
def test_settings_of_a_comparison_need_its_arms(word):
    with pytest.raises(UserError, match=r"has no effect without compare\.arms; leave"):
        load_config("short_cot_7b", [word])


def test_a_comparison_takes_no_checkpoint_of_one_run():
    with pytest.raises(UserError, match=r"load=best .* give the directory of one of its runs, e.g"):
        train(load_config("quickstart"), load="best")


def test_the_package_exports_what_its_stub_names():
    stub = (ROOT / "megatron_stare" / "__init__.pyi").read_text()
    named = [line.rpartition(" as ")[2] for line in stub.splitlines() if " as " in line]
    assert named == megatron_stare.__all__
    assert all(callable(getattr(megatron_stare, name)) for name in named)
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        megatron_stare.trian  # noqa: B018
    assert isinstance(load_config("quickstart"), Config)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda config: OptimizerConfig(lr="fast"), "OptimizerConfig.lr='fast' is refused"),
        (lambda config: dataclasses.replace(config.optimizer, lr=-1.0), "OptimizerConfig.lr=-1.0"),
        (lambda config: Config(optimizer={"lr": "x"}), "Config.optimizer.lr='x'"),
        (lambda config: OptimizerConfig(learning_rate=1), "OptimizerConfig.learning_rate=1"),
        (lambda config: load_config("quickstart", {"optimizer.lr": "x"}), "optimizer.lr=x is no"),
    ],
)
def test_a_bad_value_from_python_is_a_user_error(
    make: Callable[[Config], object], said: str
) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        make(Config())


def test_two_calls_print_one_prefix_of_the_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch adds `[rank0]: ` to the lines of a traceback whenever a process group is made."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    for _ in range(2):
        with topology.session(PolicyConfig(), 0):
            pass
    error = RuntimeError("on purpose")
    sys.excepthook(RuntimeError, error, None)
    said = capsys.readouterr().err
    assert "on purpose" in said and "[rank0]: [rank0]: " not in said


@pytest.mark.parametrize("call", [train, evaluate, lambda config: generate(config, ["1 + 1"])])
def test_servers_on_the_trainers_gpus_get_their_memory_from_the_plan(
    call: Callable[[Config], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a command: before the process has a world."""
    planned: list[bool] = []

    def noted(config: Config) -> None:
        planned.append(torch.distributed.is_initialized())
        raise UserError("enough")

    monkeypatch.setattr("megatron_stare.planning.plan.share_memory", noted)
    with pytest.raises(UserError, match="enough"):
        call(small_config(tmp_path))
    assert planned == [False]
