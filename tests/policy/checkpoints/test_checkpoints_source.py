"""The files of the model that a run started from, which every checkpoint copies, are damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_stare.policy import topology as topologies
from megatron_stare.policy.checkpoints.checkpoints import Checkpoints
from megatron_stare.policy.huggingface.files import INDEX
from tests.policy.test_optimizer_state import actor_of
from tests.tiny_models import tiny_config, write_checkpoint


def test_a_missing_file_of_the_model_costs_only_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path / "model", tiny_config("qwen2_tied", vocab_size=71))
    actor = actor_of(tmp_path / "model", "fp32", ("policy.use_distributed_optimizer=false",))
    checkpoints = Checkpoints(actor, tmp_path / "checkpoints", actor.config.run)
    index = tmp_path / "model" / INDEX
    files = {"lm_head.weight": "model.safetensors", "model.norm.weight": "gone.safetensors"}
    index.write_text(json.dumps({"weight_map": files}))
    checkpoints.save(1, {})
    assert "gone.safetensors" in checkpoints.failure and checkpoints.saved is None
    assert "warning: checkpoint 1 not written" in capsys.readouterr().err
    index.write_text("{")
    checkpoints.save(2, {})
    assert checkpoints.failure.startswith(f"{index} is damaged (")
    assert checkpoints.failure.endswith("; fetch it again")
    index.unlink()
    checkpoints.save(3, {})
    assert not checkpoints.failure
    assert checkpoints.find() == tmp_path / "checkpoints" / "step_00000003"
    topologies.stop()
