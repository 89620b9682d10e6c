"""Every setting with its type, default, range, choices and sentence."""

from __future__ import annotations

import dataclasses
import pickle
import re

import pytest

from megatron_stare.config import Config, OptimizerConfig, RolloutConfig, UserError
from megatron_stare.config.settings import settings


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


@pytest.mark.parametrize("setting", settings().values(), ids=list(settings()))
def test_every_sentence_can_be_read_alone(setting) -> None:
    assert re.fullmatch(r"(STARE's )?[A-Z].*\.", setting.description)
    first = setting.description.split()[0]
    assert first not in ("And", "Or", "The", "Of", "It", "As", "Times"), "no second half"
    assert setting.default is None or setting.checked(setting.default) == setting.default


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
