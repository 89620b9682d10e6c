"""Supervised steps before RL: in a run of its own, and the prompts of demonstrations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from megatron_stare.__main__ import main
from megatron_stare.config import Config, UserError, dump, load, override
from megatron_stare.data.prompts import load_prompts
from megatron_stare.loop import cold_start as cold_start_module
from megatron_stare.loop.cold_start import cold_start, is_due, planned, read_demonstrations
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.resolve import load_tokenizer, offered_tools
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.topology import Topology
from megatron_stare.reporting.logbook import read_metrics
from tests.distributed import run_distributed
from tests.rollout.sglang.fake_server import fake_servers
from tests.small_run import small_config

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def prepared(directory: Path, *overrides: str) -> Path:
    """A run of one step with a cold start of two, as a YAML file."""
    config = small_config(directory, "train.num_rollout=1")
    rows = [{"prompt": f"{a}+1=", "response": f"{a + 1}."} for a in range(8)]
    (directory / "shown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = (f"cold_start.data={directory}/shown.jsonl", "cold_start.batch_size=4")
    recipe = directory / "small.yaml"
    dump(override(config, [*shown, "cold_start.steps=2", *overrides]), recipe)
    return recipe


def test_a_run_without_arms_starts_from_its_demonstrations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, run = prepared(tmp_path), tmp_path / "run"
    assert main(["train", str(recipe), "--dry-run"]) == 0
    assert "OK   cold start: 8 demonstrations of 6 tokens" in (
        capsys.readouterr().out.replace(" to 6", "")
    )
    assert not run.exists()
    assert main(["train", str(recipe)]) == 0
    kept = load(run / "config.yaml")
    assert kept.policy.hf_checkpoint == str(run / "cold_start") and not is_due(kept)
    before, after = (
        load_file(place / "model.safetensors") for place in (tmp_path / "model", run / "cold_start")
    )
    assert before.keys() == after.keys()
    assert not any(before[name].equal(after[name]) for name in before if "norm" not in name)
    made = (run / "cold_start/model.safetensors").stat().st_mtime_ns

    for source in (str(recipe), str(run)):  # both continue, and nothing is shown again
        assert main(["train", source, "--dry-run"]) == 0
        assert "cold start:" not in capsys.readouterr().out
    assert main(["train", str(recipe), "train.num_rollout=2"]) == 0
    assert main(["train", str(run), "train.num_rollout=3"]) == 0
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [1, 2, 3]
    assert (run / "cold_start/model.safetensors").stat().st_mtime_ns == made

    for command in (["train", str(recipe)], ["train", str(recipe), "--dry-run"]):
        assert main([*command, "cold_start.steps=3"]) == 2
        said = capsys.readouterr()
        assert "is the result of cold_start.steps=2, not 3" in said.err + said.out


def test_a_result_of_other_demonstrations_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run was killed in its first step: it has no rollout yet."""
    recipe, shown = prepared(tmp_path), tmp_path / "shown.jsonl"
    config, before = load(recipe), shown.read_text()
    target = Path(config.run.dir) / "cold_start"
    with topologies.session(config.policy) as topology:
        assert cold_start(config, topology, Interrupt(), target)
    assert json.loads((target / "cold_start.json").read_text())["demonstrations"]
    shown.write_text(before.replace("8.", "9."))
    for command in (["train", str(recipe)], ["train", str(recipe), "--dry-run"]):
        assert main(command) == 2
        said = capsys.readouterr()
        assert f"{target} is the result of other demonstrations" in said.err + said.out
        assert f"cold_start.data={shown}" in said.err + said.out
    shown.unlink()
    assert planned(config).policy.hf_checkpoint == str(target), "no longer needed"
    shown.write_text(before)
    assert main(["train", str(recipe)]) == 0


def test_running_servers_on_the_same_gpus_have_no_memory_meanwhile(
    tmp_path: Path, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, during = cold_start_module.cold_start, []

    def asked() -> list[str]:
        order = httpx.get(f"{url}/seen").json()["order"]
        return [path.split("_")[0] for path in order if "memory" in path]

    def watched(*arguments: Any) -> bool:
        during.extend(asked())
        return train(*arguments)

    monkeypatch.setattr(cold_start_module, "cold_start", watched)
    with fake_servers(1) as (url,):
        servers = ("rollout.engine=sglang", f"sglang.urls=[{url}]", "sglang.colocated=true")
        config = load(prepared(tmp_path, *servers, "sglang.verify_weights=false"))
        for _ in range(2):  # the second time its result is there
            assert cold_start_module.started(config, topology, Interrupt())
        assert asked() == ["/release", "/resume"]
    assert during == ["/release"] * 2 + ["/resume"]


LAYOUTS = {
    "padded": (),
    "DP2": ("policy.use_distributed_optimizer=true", "policy.packed_sequences=true"),
    "TP2": ("policy.tensor_model_parallel_size=2", "policy.sequence_parallel=true"),
    "PP2": ("policy.pipeline_model_parallel_size=2",),
    "CP2": ("policy.context_parallel_size=2",),
}


def cold_starts(rank: int, world_size: int, recipe: Path) -> None:
    """The result of every layout of this many ranks, under its name."""
    for name in LAYOUTS if world_size > 1 else ("padded",):
        config = override(load(recipe), LAYOUTS[name])
        target = recipe.parent / f"{name} of {world_size}"
        assert cold_start(config, topologies.start(config.policy), Interrupt(), target)


@pytest.mark.slow
def test_the_result_is_the_same_under_every_layout(tmp_path: Path) -> None:
    lengths = "cold_start.batch_size=5", "cold_start.steps=4", "cold_start.lr=1e-3"
    recipe = prepared(tmp_path, *lengths)
    for world_size in (1, 2):
        run_distributed(cold_starts, world_size, recipe)
    expected = load_file(tmp_path / "padded of 1" / "model.safetensors")
    start = load_file(tmp_path / "model" / "model.safetensors")
    for name in LAYOUTS:
        weights = load_file(tmp_path / f"{name} of 2" / "model.safetensors")
        assert weights.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(weights[key], tensor, rtol=0, atol=2e-5, msg=f"{name} {key}")
            assert "norm" in key or (tensor - start[key]).abs().max() > 1e-3


def test_a_copied_run_needs_no_second_cold_start(tmp_path: Path) -> None:
    recipe = prepared(tmp_path)
    assert main(["train", str(recipe)]) == 0
    elsewhere = override(load(tmp_path / "run/config.yaml"), [f"run.dir={tmp_path}/copy"])
    assert not is_due(elsewhere)
    assert is_due(override(elsewhere, ["cold_start.steps=5"]))
    assert not is_due(override(elsewhere, ["cold_start.steps=0"]))


def test_missing_demonstrations_are_found_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = prepared(tmp_path, "cold_start.data=no/such.jsonl")
    assert main(["train", str(recipe), "--dry-run"]) == 2
    assert (
        "FAIL cold start: cold_start.data=no/such.jsonl does not exist" in capsys.readouterr().out
    )
    assert main(["train", str(recipe)]) == 2
    assert not (tmp_path / "run/config.yaml").exists(), "another start may have the directory"


def with_template(directory: Path, *overrides: str) -> Config:
    config = load(prepared(directory, *overrides))
    (directory / "model/chat_template.jinja").write_text(TEMPLATE)
    return config


def test_demonstrations_have_the_prompt_of_rollouts(tmp_path: Path) -> None:
    """The system prompt too, as text or as messages, unless a row has its own."""
    config = with_template(tmp_path, "data.system_prompt=Add.", "data.wrap_text=true")
    config = override(config, ["data.rollout_max_prompt_len=64", "cold_start.batch_size=1"])
    asked = {"role": "user", "content": "1+1="}
    own = {"role": "system", "content": "Sum."}
    shown = [
        {"prompt": "1+1=", "response": "2."},
        {"messages": [asked, {"role": "assistant", "content": "2."}]},
        {"messages": [own, asked, {"role": "assistant", "content": "2."}]},
    ]
    problems = [{"prompt": "1+1=", "label": "2"}] * 2 + [{"prompt": [own, asked], "label": "2"}]
    for name, rows in (("shown", shown), ("asked", problems)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = load_tokenizer(config.policy.hf_checkpoint)
    prompts, _ = load_prompts(str(tmp_path / "asked.jsonl"), tokenizer, config.data)
    found = read_demonstrations(config)
    assert [one.prompt.token_ids.tolist() for one in found] == [
        prompt.token_ids.tolist() for prompt in prompts
    ]
    assert "<s>Add." in prompts[0].text and "<s>Sum." in prompts[2].text


def test_demonstrations_offer_the_tools_of_rollouts(tmp_path: Path) -> None:
    """Those of the environment, unless a row has its own, which may be JSON text."""
    config = with_template(tmp_path, "tools.environment=calculator", "data.wrap_text=true")
    config = override(config, ["data.rollout_max_prompt_len=64", "cold_start.batch_size=1"])
    (tmp_path / "model/chat_template.jinja").write_text(
        "{% for t in tools or () %}[{{ t['function']['name'] }}]{% endfor %}" + TEMPLATE
    )
    talk = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2."}]
    own = [{"type": "function", "function": {"name": "own", "parameters": None}}]
    shown = [
        {"prompt": "1+1=", "response": "2."},
        {"messages": talk},
        {"messages": talk, "tools": None},
        {"messages": talk, "tools": own},
        {"messages": talk, "tools": json.dumps(own)},
    ]
    problems = [{"prompt": "1+1=", "label": "2"}] * 3
    problems += [{"prompt": talk[:1], "label": "2", "tools": own}] * 2
    for name, rows in (("shown", shown), ("asked", problems)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = load_tokenizer(config.policy.hf_checkpoint)
    source, tools = str(tmp_path / "asked.jsonl"), offered_tools(config)
    prompts, _ = load_prompts(source, tokenizer, config.data, tools=tools)
    assert [prompt.text[:13] for prompt in prompts[2:4]] == ["[calculator]<", "[own]<u>1+1=<"]
    assert [one.prompt.token_ids.tolist() for one in read_demonstrations(config)] == [
        prompt.token_ids.tolist() for prompt in prompts
    ]
    (tmp_path / "shown.jsonl").write_text(json.dumps({"messages": talk, "tools": "calc"}) + "\n")
    with pytest.raises(UserError, match=r"row 1: field 'tools' is text but no JSON"):
        read_demonstrations(config)


def test_a_system_prompt_for_plain_text_is_refused(tmp_path: Path) -> None:
    config = with_template(tmp_path, "data.system_prompt=Add.")
    with pytest.raises(UserError, match=r"shown\.jsonl, row 1: .* set data\.wrap_text"):
        read_demonstrations(config)
