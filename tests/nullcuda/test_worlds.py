"""Three whole steps on the device under the parallel layouts, over NCCL between real processes:
metrics, chosen tokens and weights are those of one rank on the CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import run_distributed
from tests.loop.test_trainer_layouts import (
    COMPARED,
    EXPERTS,
    SENSITIVITY,
    STARE,
    TIED,
    VARIANTS,
    train_three_steps,
)
from tests.nullcuda.runs import on_cpu, to_host
from tests.small_run import small_config
from tests.tiny_models import byte_tokenizer, tiny_config, write_checkpoint

pytestmark = pytest.mark.nullcuda
OF_TWO = (
    "TP2 SP packed",
    "PP2 VPP2",
    "CP2 packed",
    "DP2 distributed optimizer",
    "EP2 packed experts",
)
REFERENCES = ("padded", "experts")


def on_device(rank: int, size: int, directory: str, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: to_host(train_three_steps(directory, name, size)) for name in names}


def references(directory: str) -> dict[str, Any]:
    return {name: train_three_steps(directory, name, 1) for name in REFERENCES}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Every layout's results, one of each rank; those of one rank on the CPU under "cpu ...".

    The other side of the comparison holds what the layers without TransformerEngine compute.
    """
    directory = tmp_path_factory.mktemp("worlds")
    small_config(directory)
    for name, family in (("untied", "qwen2"), (TIED, "qwen2_tied"), (EXPERTS, "qwen3_moe")):
        shape = {"vocab_size": 257, "eos_token_id": 0, "max_position_embeddings": 64}
        write_checkpoint(
            directory / name, tiny_config(family, **shape, num_hidden_layers=4), seed=5
        )
        byte_tokenizer().save_pretrained(directory / name)
    expected = on_cpu(references, str(directory), folder=directory)
    ranks = run_distributed(on_device, 2, str(directory), OF_TWO, timeout_s=280, backend="nccl")
    alone = run_distributed(on_device, 1, str(directory), REFERENCES, backend="nccl")
    found = {layout: [rank[layout] for rank in ranks] for layout in OF_TWO}
    found |= {layout: [rank[layout] for rank in alone] for layout in REFERENCES}
    return found | {f"cpu {layout}": [result] for layout, result in expected.items()}


def reference(runs: dict[str, list[dict[str, Any]]], layout: str) -> dict[str, Any]:
    variant = next((variant for variant in VARIANTS if layout.endswith(variant)), "padded")
    return runs[f"cpu {variant}"][0]


@pytest.mark.parametrize("layout", [*REFERENCES, *OF_TWO])
def test_metrics_are_those_of_the_cpu(runs: dict[str, list[dict[str, Any]]], layout: str) -> None:
    for result in runs[layout]:
        for ours, theirs in zip(result["metrics"], reference(runs, layout)["metrics"], strict=True):
            for key in (*COMPARED, *STARE, *SENSITIVITY):
                assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-6), key
            assert ours["logprob_diff_max"] < 1e-4


@pytest.mark.parametrize("layout", [*REFERENCES, *OF_TWO])
def test_the_same_tokens_and_weights(runs: dict[str, list[dict[str, Any]]], layout: str) -> None:
    expected = reference(runs, layout)
    for step, (up, down) in enumerate(expected["chosen"]):
        assert up and down
        assert set().union(*(result["chosen"][step][0] for result in runs[layout])) == up
        assert set().union(*(result["chosen"][step][1] for result in runs[layout])) == down
    for result in runs[layout]:
        assert result["weights"].keys() == expected["weights"].keys()
        for name, tensor in result["weights"].items():
            torch.testing.assert_close(tensor, expected["weights"][name], rtol=1e-4, atol=1e-5)
