"""Mistakes of a new user: each ends in one line that names the field, the value and the remedy.

The rows of the table are an audit's: it gave 2 points for one clear line with the remedy, 1 where
the remedy was missing, 0 for a traceback or a late or misleading answer.
"""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron_stare.__main__ import main
from megatron_stare.config import dump
from tests.small_run import small_config

OWN = """
from megatron_stare.losses import policy_loss

def raises(response, label, metadata): raise KeyError("answer")
def text(response, label, metadata): return "yes"
def swapped(label, prediction): return 1.0
def rows(): raise RuntimeError("no network")
def nothing(): return None

class NoCall:
    tools = []
    def __init__(self, prompt): pass

class Broken:
    def __init__(self, prompt): prompt.metadata["database"]

@policy_loss()
def reduced_loss(tokens): return (-tokens.advantage * tokens.ratio).sum()

def plain(tokens): return -tokens.advantage * tokens.ratio
"""
FILES = {
    "users_code.py": OWN,
    "users_typo.py": "def f(:\n",
    "users_broken.py": "table = missing_name\n",
    "broken.yaml": "optimizer: {lr: 1e-6\nrollout:\n  x: 1\n",
    "typo.yaml": "run:\n  seed: 1\noptimizer:\n  learning_rate: 3\n",
    "type.yaml": "optimizer:\n  lr: fast\n",
    "columns.jsonl": json.dumps({"problem": "1 + 1", "solution": "2"}) + "\n",
    "label.jsonl": json.dumps({"prompt": "1 + 1", "solution": "2"}) + "\n",
    "long.jsonl": json.dumps({"prompt": "x" * 500, "label": "1"}) + "\n",
}


class Mistake(NamedTuple):
    """Words after `train tiny.yaml`, or a whole command after `: `; what its one line says."""

    command: str
    said: str


STARE_ONLY = "loss.adaptive=false loss.alpha=0.01 loss.target_entropy=0 loss.variant=O1"
MISTAKES = {
    "a section of another name": Mistake("optimiser.lr=1", "did you mean 'optimizer.lr'?"),
    "a key of TRL": Mistake("optimizer.learning_rate=1", "did you mean 'optimizer.lr'?"),
    "a key of verl": Mistake("actor_rollout_ref.actor.optim.lr=1", "did you mean 'optimizer.lr'?"),
    "a key that verl adds": Mistake("+trainer.total_epochs=3", "did you mean 'train.num_rollout'?"),
    "adapters alone through a router": Mistake(
        "adapters.rank=4 adapters.merge=false rollout.engine=sglang sglang.router_url=http://a:1",
        "adapters.merge=false is not possible with sglang.router_url=http://a:1; set "
        "adapters.merge=true or sglang.router_url=''",
    ),
    "layers of a stage without stages": Mistake(
        "policy.num_layers_in_last_pipeline_stage=1",
        "policy.num_layers_in_last_pipeline_stage=1 needs policy.pipeline_model_parallel_size above"
        " 1; set it to 0",
    ),
    "shared prompts over context ranks": Mistake(
        "policy.shared_prompts=true policy.context_parallel_size=2",
        "policy.shared_prompts=true is not possible with policy.context_parallel_size=2, which "
        "splits the prompts; set policy.shared_prompts=false or policy.context_parallel_size=1",
    ),
    "shared prompts of padded sequences": Mistake(
        "policy.shared_prompts=true policy.packed_sequences=false",
        "set policy.shared_prompts=false or policy.packed_sequences=true",
    ),
    "an option of slime": Mistake(
        "--rollout-batch-size 32", "it is a setting here: write rollout.rollout_batch_size=32"
    ),
    "an option of slime with =": Mistake("--eps-clip=0.2", "write loss.eps_clip=0.2"),
    "an option of TRL": Mistake("--learning_rate 1e-6", "write optimizer.lr=1e-6"),
    "an unknown option": Mistake("--frobnicate", "`train --help` lists options"),
    "a misspelt option": Mistake("--laod latest", "did you mean '--load'?"),
    "an unknown recipe": Mistake(": train quickstrat", "did you mean 'quickstart'? (`recipes`"),
    "an unknown command": Mistake(": trian quickstart", "did you mean 'train'?"),
    "an option as command": Mistake(": --trian", "did you mean 'train'?"),
    "no command": Mistake(":", "a command is missing; give one of"),
    "no source": Mistake(": train", "required: source; `megatron_stare train --help`"),
    "a wrong type": Mistake(
        "optimizer.lr=fast", "optimizer.lr=fast is not of type float; the default is"
    ),
    "out of range": Mistake("optimizer.lr=-1", "it must lie in [0, inf); the default is 1e-06"),
    "no data file": Mistake(
        "data.prompt_data=no.jsonl", "data.prompt_data=no.jsonl does not exist"
    ),
    "no evaluation file": Mistake(
        "evaluation.eval_data.held=no.jsonl", "evaluation.eval_data.held=no.jsonl does not exist"
    ),
    "no model": Mistake(
        "policy.hf_checkpoint=no", "policy.hf_checkpoint=no: no config.json there; give a"
    ),
    "a Hub id of a model": Mistake(
        "policy.hf_checkpoint=Qwen/Qwen3-0.6B",
        "`hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B`, and give models/Qwen3-0.6B",
    ),
    "a Hub id of data": Mistake(
        "data.prompt_data=openai/gsm8k",
        "`hf download --repo-type dataset openai/gsm8k --local-dir data/gsm8k`",
    ),
    "no such column": Mistake(
        "data.prompt_data=columns.jsonl",
        "no field 'prompt' (it has problem, solution; data.input_key names the field",
    ),
    "no such label": Mistake(
        "data.prompt_data=label.jsonl", "(it has prompt, solution; data.label_key names the field"
    ),
    "a long prompt": Mistake(
        "data.prompt_data=long.jsonl", "500 tokens, over data.rollout_max_prompt_len=16; raise it"
    ),
    "a function of rows that fails": Mistake(
        "data.prompt_data=users_code.rows", "(RuntimeError: no network); name a function without"
    ),
    "a function of no rows": Mistake(
        "data.prompt_data=users_code.nothing", "name a function without arguments that returns rows"
    ),
    "broken YAML": Mistake(": train broken.yaml", "broken.yaml, line 2: expected ',' or '}'"),
    "a typo in YAML": Mistake(": train typo.yaml", "typo.yaml, line 4: unknown key 'optimizer.le"),
    "a type in YAML": Mistake(": train type.yaml", "type.yaml, line 2: optimizer.lr=fast is no"),
    "no YAML": Mistake(": train no.yaml", "no.yaml does not exist; give a recipe (`recipes` lists"),
    "more ranks than processes": Mistake(
        "policy.tensor_model_parallel_size=3", "start a multiple of it with torchrun"
    ),
    "an unknown loss": Mistake("loss.name=gropo", "did you mean 'grpo'? (`algorithms` lists all"),
    "a loss without decorator": Mistake(
        "loss.name=users_code.plain", "put @policy_loss() above it"
    ),
    "a loss that reduces": Mistake(
        f"loss.name=users_code.reduced_loss {STARE_ONLY}",
        "return one value per token, shape",
    ),
    "an unknown reward": Mistake("scoring.reward=maths", "did you mean 'math'?"),
    "a reward of no module": Mistake(
        "scoring.reward=nowhere.f", "(No module named 'nowhere'); check the path and PYTHONPATH"
    ),
    "a reward of no name": Mistake(
        "scoring.reward=users_code.raise_s", "did you mean 'users_code.raises'?"
    ),
    "a module with a syntax error": Mistake(
        "scoring.reward=users_typo.f", "cannot be imported (SyntaxError: "
    ),
    "a module with a fault": Mistake(
        "scoring.reward=users_broken.f", "(NameError: name 'missing_name' is not defined)"
    ),
    "a reward of other parameters": Mistake(
        "scoring.reward=users_code.swapped",
        "it has the parameters (label, prediction); write f(response, label, metadata)",
    ),
    "a reward that raises": Mistake(
        "scoring.reward=users_code.raises",
        "KeyError: 'answer'); correct it, or the labels; write f(response, label, metadata)",
    ),
    "a reward that returns text": Mistake(
        "scoring.reward=users_code.text", "returned str, neither a number nor a Verdict); correct"
    ),
    "no such environment": Mistake(
        "tools.environment=users_code.Nope", "users_code has no 'Nope'; name a class or function"
    ),
    "an unknown environment": Mistake("tools.environment=pyhton", "or python or calculator"),
    "an environment without call": Mistake(
        "tools.environment=users_code.NoCall", "makes a NoCall without call, close; add what"
    ),
    "an environment that raises": Mistake(
        "tools.environment=users_code.Broken", "raises KeyError: 'database' for the first prompt"
    ),
    "a mapping without braces": Mistake("scoring.rewards=math:1", "write '{math: 1}'"),
    "a list without brackets": Mistake("run.logbooks=wandb", "write '[wandb]'"),
    "an open bracket": Mistake("run.logbooks=[wandb", "logbooks=[wandb' is not YAML, line 1"),
    "wandb is not installed": Mistake(
        "run.logbooks=[wandb]", "needs wandb; pip install 'megatron-stare[tracking]'"
    ),
    "responses over the model's length": Mistake(
        "rollout.rollout_max_response_len=4000", "exceed the model's max_position_embeddings=64"
    ),
    "an unknown key of a section": Mistake(
        "loss.entropy_target=3", "did you mean 'loss.target_entropy'?"
    ),
    "a run.dir that cannot be written": Mistake(
        "run.dir=/proc/run", "run.dir=/proc/run cannot be written"
    ),
    "an unsupported model": Mistake(
        "policy.hf_checkpoint=other", "model_type='gemma3' is not supported; use one of qwen2"
    ),
    "no tokenizer": Mistake("policy.hf_checkpoint=mute", "mute: no tokenizer there; copy"),
    "no reference": Mistake(
        "policy.ref_hf_checkpoint=no loss.kl_loss_coef=0.1", "policy.ref_hf_checkpoint=no: no con"
    ),
    "a teacher that is nowhere": Mistake(
        "loss.distillation_coef=1", "needs a teacher; set policy.ref_hf_checkpoint"
    ),
    "a teacher of equal groups": Mistake(
        "loss.distillation_coef=1 policy.ref_hf_checkpoint=model rollout.dynamic_sampling=true",
        "set it to false with loss.distillation_coef",
    ),
    "servers of no reference": Mistake(
        "sglang.reference_urls=[http://a:1]",
        "has no effect without loss.kl_loss_coef or loss.distillation",
    ),
    "a reference on a server without an address": Mistake(
        "sglang.reference_urls=[a] loss.kl_loss_coef=0.1", "'a', which is not an address; write"
    ),
    "servers of a reference at another temperature": Mistake(
        "sglang.reference_urls=[a] loss.kl_loss_coef=0.1 rollout.rollout_temperature=0.8",
        "which give log-probs at temperature 1; set rollout.rollout_temperature=1.0 or sglang.ref",
    ),
    "a reference on a server that does not answer": Mistake(
        "sglang.reference_urls=[http://127.0.0.1:9] loss.kl_loss_coef=0.1", "start the server"
    ),
    "an exact divergence from no teacher": Mistake(
        "loss.distillation_top_k=8", "=8 has no effect without loss.distillation_coef; set that, or"
    ),
    "an exact divergence from a teacher on servers": Mistake(
        "loss.distillation_coef=1 loss.distillation_top_k=8 policy.ref_hf_checkpoint=model "
        "rollout.dynamic_sampling=false sglang.reference_urls=[http://127.0.0.1:9]",
        "['http://127.0.0.1:9'], which do not give the teacher's whole distribution; set loss.dist",
    ),
    "rewards against no teacher": Mistake(
        "loss.reward_coef=0", "loss.reward_coef=0.0 has no effect without loss.distillation_coef"
    ),
    "a reference without a divergence": Mistake(
        "policy.ref_hf_checkpoint=model", "without loss.kl_loss_coef or loss.distillation_coef"
    ),
    "a moving reference of another model": Mistake(
        "policy.ref_update_interval=9 loss.kl_loss_coef=0.1 policy.ref_hf_checkpoint=larger",
        "into policy.ref_hf_checkpoint=larger, another kind of model (vocab_size: 257 and 512)",
    ),
    "a moving reference of adapters": Mistake(
        "policy.ref_update_interval=9 loss.kl_loss_coef=0.1 adapters.rank=2",
        "policy.ref_update_interval=9 is not possible with adapters.rank=2, whose reference stays",
    ),
    "bounds of no correction": Mistake(
        "mismatch.upper=2 mismatch.rejected=drop",
        "mismatch.upper=2.0, mismatch.rejected=drop have no effect without mismatch.correction; set"
        " that, or return to mismatch.upper=0.0, mismatch.rejected=zero",
    ),
    "adapters of no rank": Mistake(
        "adapters.start=lora", "adapters.start=lora has no effect without adapters.rank; set that"
    ),
    "resampling without a method": Mistake(
        "rollout.resampling.samples=4", "without rollout.resampling.method=uec_rl; set that, or"
    ),
    "a setting of another method": Mistake(
        "rollout.resampling.method=uec_rl rollout.resampling.prompt_share=1 "
        "rollout.dynamic_sampling=false",
        "prompt_share=1.0 has no effect without rollout.resampling.method=aepo",
    ),
    "demonstrations without steps": Mistake(
        "cold_start.data=shown.jsonl",
        "has no effect without both cold_start.data and cold_start.steps; set that, or return to",
    ),
    "turns of no tools": Mistake(
        "tools.max_turns=4", "tools.max_turns=4 has no effect without tools.environment; set that"
    ),
    "limits of no agent": Mistake(
        "agents.max_calls=4 agents.hosts=3",
        "agents.hosts=3, agents.max_calls=4 have no effect without agents.function or agents.comm",
    ),
    "a judge that is not asked": Mistake(
        "judge.urls=[http://127.0.0.1:9/v1]", "has no effect without scoring.reward=judge; set that"
    ),
    "a pattern of no reward": Mistake(
        "scoring.reward=math scoring.format_pattern=^<think>",
        "scoring.format_pattern=^<think> has no effect without scoring.reward=format; set that, or",
    ),
    "servers that are not asked": Mistake(
        "sglang.urls=[http://127.0.0.1:9]", "has no effect without rollout.engine=sglang; set that"
    ),
    "a relay of no delta": Mistake(
        "rollout.engine=sglang sglang.relays=[http://127.0.0.1:9]",
        "has no effect without sglang.sync_method=delta; set that, or return to sglang.relays=[]",
    ),
    "a decay that rises": Mistake(
        "optimizer.min_lr=2 optimizer.lr_decay_style=cosine", "optimizer.min_lr=2, the end of the"
    ),
    "the end of no decay": Mistake(
        "optimizer.min_lr=1e-9", "optimizer.min_lr=1e-09 has no effect without optimizer.lr_decay_"
    ),
    "a replay of other settings": Mistake(
        "optimizer.lr=1 --replay 3 --load best",
        "takes a run as it is; remove optimizer.lr=1 --load",
    ),
    "seeds of one run": Mistake(
        "--seeds 0,1", "compare.seeds=[0, 1] has no effect without compare.arms; leave it out, or"
    ),
    "adapters of an arm without them": Mistake(
        "compare.arms.a=[adapters.merge=false] compare.arms.b=[adapters.rank=2]",
        "arm a: adapters.merge=false has no effect without adapters.rank",
    ),
    "evaluate of a bare model": Mistake(": evaluate model", "and then policy.hf_checkpoint=model"),
    "a checkpoint that is not there": Mistake("--load step_9", "--load step_9: not in"),
    "an arm's reward": Mistake(
        "compare.arms.a=[loss.name=grpo] compare.arms.b=[scoring.reward=users_code.nope]",
        "arm b: scoring.reward='users_code.nope'",
    ),
}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that each test gets a copy of."""
    directory = tmp_path_factory.mktemp("template")
    dump(small_config(directory, "loss.settings={}"), directory / "tiny.yaml")
    for name, text in FILES.items():
        (directory / name).write_text(text)
    shape = json.loads((directory / "model/config.json").read_text())
    shutil.copytree(directory / "model", directory / "other")
    (directory / "other/config.json").write_text(json.dumps(shape | {"model_type": "gemma3"}))
    shutil.copytree(directory / "model", directory / "larger")
    (directory / "larger/config.json").write_text(json.dumps(shape | {"vocab_size": 512}))
    shutil.copytree(directory / "model", directory / "mute")
    for file in (directory / "mute").glob("tokenizer*"):
        file.unlink()
    return directory


@pytest.fixture
def place(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new user's directory."""
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(recipe.read_text().replace(str(template), str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


Said = Callable[..., tuple[int, str, str]]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """Runs a command: its exit code, stderr and stdout."""

    def run(*words: str) -> tuple[int, str, str]:
        try:
            code = main([*words])
        except SystemExit as end:
            code = int(str(end.code))
        printed = capsys.readouterr()
        return code, printed.err, printed.out

    return run


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_with_its_remedy(name: str, place: Path, said: Said) -> None:
    command, expected = MISTAKES[name]
    whole = command[1:].split() if command[0] == ":" else ["train", "tiny.yaml", *command.split()]
    code, err, _ = said(*whole)
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 2 and len(errors) == 1, err
    assert expected in errors[0] and "Traceback" not in err and len(errors[0]) < 480
    assert not any(file.stat().st_size for file in place.glob("run/metrics.jsonl")), "no step"


@pytest.mark.parametrize("name", ["tools.environment=users_code.Broken", "loss.name=gropo"])
def test_dry_run_finds_what_train_finds(
    name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "tiny.yaml", "--dry-run", name]) == 2
    assert "FAIL" in capsys.readouterr().out


def test_every_fault_is_reported_at_once(place: Path, said: Said) -> None:
    faults = ("loss.name=gropo", "scoring.reward=nowhere.f", "data.prompt_data=no.jsonl")
    code, err, _ = said("train", "tiny.yaml", *faults)
    assert code == 2 and [line[:7] for line in err.splitlines()] == ["error: "] * 3


def test_a_run_is_corrected_in_its_own_directory_continued_and_complete(
    place: Path, said: Said
) -> None:
    for typo in ("policy.hf_checkpoint=no", "loss.name=gropo", "data.prompt_data=no.jsonl"):
        assert said("train", "tiny.yaml", typo)[0] == 2
    train = ("train", "tiny.yaml", "run.save_interval=1", "train.num_rollout=2")
    assert said(*train)[0] == 0
    code, _, out = said(*train)
    assert code == 0 and "is complete: 2 steps, and train.num_rollout=2; raise it" in out
    code, err, _ = said(*train, "run.seed=7")
    assert code == 2 and "holds a run with run.seed=0, not 7; choose another run.dir" in err
    code, err, _ = said(*train, "--load", "step_00000009", "train.num_rollout=3")
    assert code == 2 and "there are step_00000002" in err
    weights = next((place / "run/checkpoints/step_00000002").glob("*.distcp"))
    weights.write_bytes(weights.read_bytes()[:-10])
    code, err, _ = said(*train, "train.num_rollout=3")
    assert code == 2 and f"is damaged: {weights.name}" in err and "--load latest-good" in err


def test_a_taken_port_is_refused(place: Path, said: Said) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, err, _ = said("train", "tiny.yaml", f"run.prometheus_port={port}")
        assert code == 2 and "choose another port" in err
        assert said("train", "tiny.yaml", "train.num_rollout=1")[0] == 0
        code, err, _ = said("report", "run", "--watch", "--port", str(port))
        assert code == 2 and "give another one, or 0" in err


def test_a_cold_start_does_not_begin_if_the_run_would_be_refused(place: Path, said: Said) -> None:
    rows = [{"prompt": "1", "response": "2"}] * 8
    (place / "shown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    start = ("cold_start.data=shown.jsonl", "cold_start.steps=1", "cold_start.batch_size=4")
    code, err, _ = said("train", "tiny.yaml", *start, "tools.environment=users_code.Nope")
    assert code == 2 and "users_code has no 'Nope'" in err
    arms = ("compare.arms.a=[loss.name=grpo]", "compare.arms.b=[loss.name=gropo]")
    code, err, _ = said("train", "tiny.yaml", *start, *arms, "run.dir=both")
    assert code == 2 and "arm b: loss.name='gropo' is unknown" in err
    assert not list(place.rglob("cold_start"))
