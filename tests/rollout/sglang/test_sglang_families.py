"""`parity` of every model family that SGLang serves on a CPU, by a real server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_stare.__main__ import main
from tests.rollout.sglang.test_sglang_parity import command
from tests.rollout.sglang.world import (
    CHECKSUMS,
    NEWER,
    TOLERANCE,
    make_model,
    start_server,
    wait_for,
)

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
