"""data.chat_template_kwargs: variables of the chat template, the same in prompts, demonstrations
and the turns of tools and agents.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from megatron_stare.compare.worlds.calculator import tool_tokenizer
from megatron_stare.compare.worlds.files import write_checkpoint
from megatron_stare.config import Config, DataConfig, UserError, override
from megatron_stare.data.prompts import load_prompts, tokenize_conversation
from megatron_stare.loop.assemble import with_tools
from megatron_stare.rollout.agents.agent_engine import AgentEngine
from megatron_stare.rollout.episodes import ChatTemplate
from megatron_stare.rollout.tools.engine import ToolEngine
from tests.rollout.agents.scripted import Scripted

# As Qwen3's: without thinking every turn of the assistant begins with an empty thought, here a 0.
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{% if m['role'] == 'assistant' and thinks is false %}0{% endif %}{{ m['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% if thinks is false %}0{% endif %}"
    "{% endif %}"
)
OFF: dict[str, Any] = {"thinks": False}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    made = copy.deepcopy(tool_tokenizer())
    made.chat_template = TEMPLATE
    return made


def prompts_of(path: Path, tokenizer: PreTrainedTokenizerBase, **variables: Any) -> list[str]:
    path.write_text(json.dumps({"prompt": "6*7=", "label": "42"}) + "\n")
    config = DataConfig(wrap_text=True, chat_template_kwargs=variables)
    prompts, _ = load_prompts(str(path), tokenizer, config)
    return [tokenizer.decode(prompt.token_ids) for prompt in prompts]


def test_prompts_demonstrations_tools_and_agents_have_the_same_variables(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    assert prompts_of(tmp_path / "a.jsonl", tokenizer) == ["<user>6*7=<|end|><assistant>"]
    (prompt,) = prompts_of(tmp_path / "a.jsonl", tokenizer, **OFF)
    assert prompt == "<user>6*7=<|end|><assistant>0"
    talk = [{"role": "user", "content": "6*7="}, {"role": "assistant", "content": "42"}]
    ids, mask = tokenize_conversation(talk, tokenizer, variables=OFF)
    assert tokenizer.decode(ids[: mask.index(1)]) == prompt
    assert tokenizer.decode(ids) == f"{prompt}42<|end|>"
    config = override(
        Config(), ["tools.environment=calculator", "data.chat_template_kwargs={thinks: false}"]
    )
    engine = with_tools(None, config, tokenizer)  # type: ignore[arg-type]
    assert isinstance(engine, ToolEngine)
    engine._thread.stop()
    last = tokenizer.convert_tokens_to_ids("<|end|>")
    answered = tokenizer.decode(engine.messages.ids(["42"], last))
    assert answered == "<tool>42<|end|><assistant>0"
    write_checkpoint(tmp_path / "model", tokenizer, 0, 64)
    agent = (
        f"policy.hf_checkpoint={tmp_path / 'model'}",
        "agents.function=tests.rollout.agents.programs.calculator",
        "agents.hosts=1",
        "tools.environment=",
    )
    playing = with_tools(
        Scripted(tokenizer, lambda text, number: text), override(config, agent), tokenizer
    )  # type: ignore[arg-type]
    assert isinstance(playing, AgentEngine)
    renderer = playing.renderer
    playing.close()
    assert tokenizer.decode(renderer.prompt(talk[:1], ()).tolist()) == prompt
    bridge = renderer.bridge([{"role": "tool", "content": "42"}], last, "")
    assert tokenizer.decode(bridge.tolist()) == answered


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("enable_thinking", "the chat template does not read it"),
        ("think", "the chat template does not read it"),
        ("add_generation_prompt", "the trainer sets it"),
    ],
)
def test_a_variable_that_has_no_effect_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, name: str, reason: str
) -> None:
    with pytest.raises(UserError, match=rf"data.chat_template_kwargs has {name}=False: {reason}"):
        prompts_of(tmp_path / "a.jsonl", tokenizer, **{name: False})


def test_a_template_that_writes_the_date_writes_the_same_on_every_day(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """As Llama 3.2's: a run that resumes after midnight must have its prompts."""
    dated = copy.deepcopy(tokenizer)
    dated.chat_template = (
        "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}"
        "{% endif %}{{ date_string }}" + TEMPLATE
    )
    (prompt,) = prompts_of(tmp_path / "a.jsonl", dated)
    assert prompt.startswith("26 Jul 2024<user>")
    (prompt,) = prompts_of(tmp_path / "a.jsonl", dated, date_string="1 Dec 2026")
    assert prompt.startswith("1 Dec 2026<user>")
    talk = [{"role": "user", "content": "6*7="}]
    assert ChatTemplate(dated).text(talk).startswith("26 Jul 2024<user>")
