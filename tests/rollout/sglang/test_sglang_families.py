"""`parity` of every model family that SGLang serves on a CPU, by a real server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_stare.__main__ import main
from megatron_stare.config import SGLangConfig
from megatron_stare.rollout.sglang.server import Model, arguments_of, read_config
from tests.policy.conversion.test_convert_text_part import CLASSES, vision_language
from tests.rollout.sglang.test_sglang_parity import command
from tests.rollout.sglang.world import (
    CHECKSUMS,
    NEWER,
    TOLERANCE,
    make_model,
    start_server,
    wait_for,
)
from tests.tiny_models import byte_tokenizer, save_tokenizer

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not (NEWER and CHECKSUMS), reason="this SGLang computes no checksums"),
]
SLOW = pytest.mark.slow
SPARSE: dict[str, Any] = {"moe_intermediate_size": 32}
# Fields of published config.json files that SGLang reads and transformers does not.
ROUTER = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}


# family, changes of the tiny model, whether SGLang has code of its own for it
SERVED: tuple[tuple[str, dict[str, Any], bool], ...] = (
    ("glm4_moe", SPARSE, True),
    ("deepseek_v3", SPARSE | ROUTER, True),
    ("deepseek_v3", SPARSE | ROUTER | {"q_lora_rank": None}, True),
    ("glm4_moe_lite", SPARSE, True),
    ("dots1", SPARSE, False),
    ("qwen3_moe", SPARSE | {"mlp_only_layers": []}, True),
    ("llama", {}, True),
    ("mistral", {}, True),
    ("seed_oss", {}, False),
    ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}, False),
)


@pytest.mark.parametrize(
    ("family", "changes", "native"),
    [pytest.param(*case, marks=SLOW if number else ()) for number, case in enumerate(SERVED)],
)
def test_a_server_and_the_trainer_agree(
    family: str,
    changes: dict[str, Any],
    native: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    """SGLang runs a model without `native` code by that of transformers."""
    checkpoint = make_model(tmp_path / "served", family, **changes)
    server = start_server(checkpoint, tmp_path / "server.txt")
    settings = ("policy.moe_aux_loss_coeff=0", "sglang.verify_weights=")
    try:
        wait_for([server], checkpoint)
        if not native:
            wrong = command(tmp_path, server, checkpoint, settings[0], f"{settings[1]}true")
            assert main(wrong) == 1
            assert "set sglang.verify_weights=false" in capsys.readouterr().out
        right = f"{settings[1]}{str(native).lower()}"
        assert main(command(tmp_path, server, checkpoint, settings[0], right)) == 0
    finally:
        server.stop()
    found = json.loads((tmp_path / "run/parity.json").read_text())
    assert all(each["tokens"] > 20 and each["largest"] < TOLERANCE for each in found["pairs"])


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("kind", CLASSES)
def test_a_server_of_a_vision_language_model_takes_its_text_part(
    kind: str, gpus: int, tmp_path: Path
) -> None:
    """Gated delta nets too, whose weights a server fuses and splits; its checksums are compared."""
    experts = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    changes = {"max_position_embeddings": 512} | (experts if kind == "qwen3_5_moe" else {})
    checkpoint = vision_language(tmp_path / "served", kind, torch.float32, **changes)
    save_tokenizer(checkpoint)
    model = Model(str(checkpoint), "float32", None, frozenset(), read_config(str(checkpoint)))  # type: ignore[arg-type]
    arguments = arguments_of(SGLangConfig(gpus_per_server=gpus), model, 0)
    assert "--json-model-override-args" in arguments
    server = start_server(checkpoint, tmp_path / "server.txt", 0, *arguments[2:])
    try:
        wait_for([server], checkpoint, byte_tokenizer())
        assert main(command(tmp_path, server, checkpoint, "sglang.verify_weights=true")) == 0
    finally:
        server.stop()
    found = json.loads((tmp_path / "run/parity.json").read_text())
    assert all(each["tokens"] > 20 and each["largest"] < 1e-3 for each in found["pairs"])
