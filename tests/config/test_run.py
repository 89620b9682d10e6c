"""Every setting with its type, default, range, choices and sentence, and the rules between them."""

from __future__ import annotations

import dataclasses
import pickle
import re

import pytest

from megatron_stare.config import Config, OptimizerConfig, RolloutConfig, UserError, override
from megatron_stare.config.rules import READERS, RELATIONS, check, unread
from megatron_stare.config.run import settings


def test_every_setting_has_its_type_default_and_sentence() -> None:
    found = settings()
    lr, staleness = found["optimizer.lr"], found["rollout.max_staleness"]
    assert (lr.type_name, lr.default, lr.interval) == ("float", 1e-6, "[0, inf)")
    assert staleness.description.startswith("Maximum age of a rollout's oldest token")
    assert staleness.description.endswith("else 1."), "lines are joined"
    assert found["policy.fp8"].values == "none | e4m3 | hybrid"
    assert found["rollout.rollout_top_p"].values == "float in (0, 1]"
    assert found["loss.eps_clip"].values == "float in [0, 1]" and not found["loss.gate"].interval
    assert "policy.tuning.fp8_recipe" in found, "of a section within a section"


def test_every_sentence_can_be_read_alone() -> None:
    for key, setting in settings().items():
        assert re.fullmatch(r"(STARE's )?[A-Z].*\.", setting.description), key
        first = setting.description.split()[0]
        assert first not in ("And", "Or", "The", "Of", "It", "As", "Times"), key
        assert setting.default is None or setting.checked(setting.default) == setting.default


SECTIONS = {field.name for field in dataclasses.fields(Config)}
READ = {
    "scoring.format_pattern=^<think>": ["scoring.rewards={math: 1, format: 0.1}"],
    "scoring.code_seconds=9": ["scoring.reward=per_source", "scoring.per_source={a: code}"],
    "judge.urls=[http://127.0.0.1:9/v1]": ["scoring.reward=judge"],
    "mismatch.on_alarm=mask": ["mismatch.alarm=0.1"],
    "tools.max_turns=2": ["tools.environment=calculator"],
    "cold_start.data=shown.jsonl": ["cold_start.steps=1"],
    "cold_start.steps=1": ["cold_start.data=shown.jsonl"],
    "cold_start.lr=1e-4": ["cold_start.data=shown.jsonl", "cold_start.steps=1"],
    "agents.max_calls=3": ["agents.command=[agent]"],
    "sglang.urls=[http://127.0.0.1:9]": ["rollout.engine=sglang"],
    "sglang.draft_tokens=2": ["rollout.engine=sglang", "sglang.speculation=ngram"],
    "sglang.sync_directory=shared": ["rollout.engine=sglang", "sglang.sync_method=disk"],
}


@pytest.mark.parametrize(("word", "readers"), READ.items(), ids=list(READ))
def test_a_setting_needs_a_reader(word: str, readers: list[str]) -> None:
    assert not unread(override(Config(), [*readers, word]))
    with pytest.raises(UserError, match=f"{word.partition('=')[0]}.* has no effect without"):
        override(Config(), [word])


def test_every_rule_is_of_settings_and_the_defaults_break_none() -> None:
    """A misspelt key in a rule would make it hold for no configuration."""
    assert {key for keys in READERS.values() for key in keys} <= settings().keys() | SECTIONS
    conditions = [*READERS, *(word for relation in RELATIONS for word in relation.split(" ")[::2])]
    for condition in conditions:
        key = condition.partition("=")[0]
        section, _, name = key.partition(".")
        assert key in settings() or hasattr(getattr(Config(), section), name), condition
    check(Config())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sglang.weights=fp8"], "needs policy.dtype=bf16, not fp32; servers keep"),
        (["scoring.reward=judge", "judge.urls=[a]"], "write http://host:port/v1"),
        (
            ["adapters.rank=8", "adapters.merge=false", "sglang.router_url=http://a"],
            "adapters.merge=false is not possible with sglang.router_url=http://a; set "
            "adapters.merge=true or sglang.router_url=''",
        ),
        (
            ["loss.adaptive=true", "loss.reweight_w=4"],
            "loss.reweight_w=4, at which W starts, is above loss.w_max=1.5; raise the bound",
        ),
        (
            ["loss.adaptive=true", "loss.reweight_m=0.4"],
            "loss.reweight_m=0.4, at which M starts, is below loss.m_min=0.5; lower the bound",
        ),
    ],
)
def test_a_refusal_names_settings_values_and_remedy(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        override(Config(), ["rollout.engine=sglang", *overrides])


def test_a_setting_that_some_arms_do_not_read_excludes_nothing() -> None:
    shared = ["rollout.engine=sglang", "adapters.merge=false", "sglang.router_url=http://a"]
    override(Config(), [*shared, "compare.arms.lora=[adapters.rank=8,sglang.router_url=]"])


def test_settings_of_a_recipe_go_with_their_reader() -> None:
    """Only an override has to be read: the recipe's settings of its tools return to defaults."""
    recipe = override(Config(), ["tools.environment=calculator", "tools.max_turns=2"])
    assert override(recipe, ["optimizer.lr=1"]).tools == recipe.tools
    assert override(recipe, ["tools.environment="]).tools == Config().tools
    with pytest.raises(UserError, match=r"tools\.max_turns=3 has no effect without"):
        override(recipe, ["tools.environment=", "tools.max_turns=3"])


def test_sections_are_frozen_values() -> None:
    config = Config(rollout=RolloutConfig(rollout_batch_size=4))
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.rollout.rollout_batch_size = 8  # type: ignore[misc]
    assert dataclasses.replace(config.rollout, rollout_batch_size=64) == RolloutConfig()
    with pytest.raises(UserError, match="greater than or equal to 0"):
        dataclasses.replace(OptimizerConfig(), lr=-1.0)
    with pytest.raises(UserError, match="nmae"):
        OptimizerConfig(nmae=1)  # type: ignore[call-arg]
