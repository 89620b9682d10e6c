"""Adapters in checkpoints, read under other layouts, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megatron_stare.config import AdaptersConfig, PolicyConfig, UserError
from megatron_stare.policy import build, model_state
from megatron_stare.policy.adapters import AdaptedWeights, adapters_of, check
from megatron_stare.policy.checkpoints import actor_state
from megatron_stare.policy.huggingface.peft_files import SIDES, projections
from tests.distributed import run_distributed
from tests.policy.test_optimizer_state import actor_of, same, save, update, whole
from tests.tiny_models import tiny_config, write_checkpoint

TP, PP = ("policy.tensor_model_parallel_size=2", "policy.pipeline_model_parallel_size=2")
SP, SPREAD = "policy.sequence_parallel=true", "policy.use_distributed_optimizer=true"
RANK, LATENT = "adapters.rank=3", "adapters.targets=q,k,v,o"
EP, WHOLE = "policy.expert_model_parallel_size=2", "policy.expert_tensor_parallel_size=1"
SHARED = "adapters.experts=shared"
OTHERS = {"TP2": (TP, SP), "PP2": (PP,), "DP2": (SPREAD,)}
OF_EXPERTS = OTHERS | {"EP2": (EP, SPREAD), "TP2": (TP, SP, EP)}


def layouts(more: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Layouts of two ranks, by name; with whole experts TP2 divides these too."""
    return OF_EXPERTS if WHOLE in more else OTHERS


def saved(
    rank: int, world_size: int, folder: str, dtype: str, *more: str
) -> tuple[dict[str, Any], str]:
    """A checkpoint of two updates under TP2; its content and the base's fingerprint."""
    layout = (*layouts(more)["TP2"], SPREAD)
    actor = actor_of(Path(folder) / "model", dtype, (RANK, *layout, *more))
    for _ in range(2):
        update(actor)
    save(actor, Path(folder) / "checkpoint")
    return whole(actor), actor.base_fingerprint


def loaded(
    rank: int, world_size: int, folder: str, dtype: str, names: tuple[str, ...], *more: str
) -> dict[str, tuple[dict[str, Any], str]]:
    found = {}
    for name in names:
        layout = layouts(more).get(name, ())
        actor = actor_of(Path(folder) / "model", dtype, (RANK, *layout, *more))
        actor_state.into_actor(actor, Path(folder) / "checkpoint")
        found[name] = (whole(actor), actor.base_fingerprint)
        update(actor)
    return found


@pytest.mark.parametrize(
    ("family", "dtype", "more"),
    [
        pytest.param("qwen2_tied", "fp32", (), marks=pytest.mark.slow),
        ("qwen2_tied", "bf16", ()),
        ("deepseek_v3", "fp32", (LATENT,)),
        pytest.param("glm4_moe", "fp32", (WHOLE,), marks=pytest.mark.slow),
        ("glm4_moe", "bf16", (WHOLE, SHARED)),
    ],
)
def test_a_checkpoint_of_adapters_loads_under_every_layout(
    family: str, dtype: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "model", tiny_config(family, num_hidden_layers=4))
    content, fingerprint = run_distributed(saved, 2, str(tmp_path), dtype, *more)[0]
    keys = model_state.read_metadata(tmp_path / "checkpoint").state_dict_metadata
    assert any(key.startswith("adapters.0.") for key in keys)
    assert not [key for key in keys if key.startswith(("embedding.", "decoder.", "output_layer."))]
    for size, names in ((1, ("one",)), (2, tuple(layouts(more)))):
        for rank in run_distributed(loaded, size, str(tmp_path), dtype, names, *more):
            for name, (found, own) in rank.items():
                assert same(found, content), name
                assert own == fingerprint, name


def gathered(
    rank: int, world_size: int, folder: str, names: tuple[str, ...]
) -> dict[str, dict[str, Tensor]]:
    """All adapters of the checkpoint under each layout; on one rank, the parameters too."""
    found = {}
    for name in names:
        actor = actor_of(Path(folder) / "model", "bf16", (RANK, *OTHERS.get(name, ())))
        actor_state.into_actor(actor, Path(folder) / "checkpoint")
        found[name] = dict(AdaptedWeights(actor.weights(), actor.adapters).adapters())
        if world_size == 1:
            own = dict(actor.chunks[0].named_parameters())
            every = projections(actor.hf, actor.adapters)
            found["own"] = {
                e.name(side): own[e.key(side)].detach() for e in every for side in SIDES
            }
    return found


def test_adapters_are_gathered_whole_under_every_layout(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", tiny_config("qwen2_tied", num_hidden_layers=4))
    run_distributed(saved, 2, str(tmp_path), "bf16")
    (alone,) = run_distributed(gathered, 1, str(tmp_path), ("one",))
    assert same(alone["one"], alone["own"]) and all(each.any() for each in alone["own"].values())
    for rank in run_distributed(gathered, 2, str(tmp_path), ("TP2", "PP2", "DP2")):
        for name, found in rank.items():
            assert same(found, alone["own"]), name


def of_one_stage(rank: int, world_size: int, folder: str) -> int:
    options = (RANK, PP, "adapters.targets=up", "adapters.experts=none")
    actor = actor_of(Path(folder) / "model", "bf16", options)
    update(actor)
    content = whole(actor)
    save(actor, Path(folder) / "checkpoint")
    actor = actor_of(Path(folder) / "model", "bf16", options)
    actor_state.into_actor(actor, Path(folder) / "checkpoint")
    assert same(whole(actor), content)
    return len(adapters_of(actor.chunks))


def test_a_pipeline_stage_may_have_no_adapter(tmp_path: Path) -> None:
    config = tiny_config("qwen3_moe", num_hidden_layers=4, mlp_only_layers=[0])
    write_checkpoint(tmp_path / "model", config)
    assert run_distributed(of_one_stage, 2, str(tmp_path)) == [1, 0]


def refused(rank: int, world_size: int, folder: str) -> list[str]:
    place, found = Path(folder), []
    actor = actor_of(place / "model", "fp32", (RANK,))
    save(actor, place / "adapters")
    save(actor_of(place / "model", "fp32", ()), place / "whole")
    for model, checkpoint, options in (
        ("other", "adapters", (RANK,)),
        ("model", "whole", (RANK,)),
        ("model", "adapters", ()),
    ):
        with pytest.raises(UserError) as error:
            actor_state.into_actor(actor_of(place / model, "fp32", options), place / checkpoint)
        found.append(str(error.value))
    return found


def test_adapters_of_another_base_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", tiny_config("qwen2"))
    shutil.copytree(tmp_path / "model", tmp_path / "other")
    write_checkpoint(tmp_path / "other", tiny_config("qwen2"), seed=1)
    (messages,) = run_distributed(refused, 1, str(tmp_path))
    assert "holds adapters of other weights" in messages[0]
    assert "holds whole weights, and adapters.rank=3" in messages[1]
    assert "holds adapters alone, and adapters.rank=0" in messages[2]


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("deepseek_v3", {"targets": "q,k"}, "makes k and v by the same projections"),
        ("deepseek_v3", {"targets": "q,k,v,o"}, ""),
        ("qwen3_moe", {"targets": "q,up"}, "policy.expert_tensor_parallel_size=2 (0: tensor_mod"),
        ("qwen3_moe", {"targets": "q,k,v,o"}, ""),
        ("qwen3_moe", {"targets": "q,up", "experts": "none"}, ""),
        ("qwen3", {"targets": "q,gate"}, ""),
        ("qwen3", {"merge": False}, ""),
        ("qwen3_moe", {"targets": "q,k", "merge": False}, ""),
        ("qwen3_moe", {"experts": "none", "merge": False}, "mlp.gate_proj.weight has an adapter"),
        ("glm4_moe", {"targets": "o,up", "experts": "none", "merge": False}, "up_proj.weight has"),
        ("deepseek_v3", {"targets": "q", "merge": False}, "q_a_proj.weight has an adapter"),
    ],
)
def test_unsupported_combinations_are_refused_by_name(
    family: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    tiny_config(family).save_pretrained(directory)
    hf = build.read_hf_config(str(directory))
    policy = PolicyConfig(tensor_model_parallel_size=2, sequence_parallel=True)
    check(hf, AdaptersConfig(**settings), policy)
    if not message:
        check(hf, AdaptersConfig(rank=2, **settings), policy)
        return
    with pytest.raises(UserError) as error:
        check(hf, AdaptersConfig(rank=2, **settings), policy)
    assert message in str(error.value)


def test_adapters_without_a_target_are_refused() -> None:
    hf, settings = tiny_config("qwen3_moe"), AdaptersConfig(rank=2, targets="up", experts="none")
    check(hf, settings, PolicyConfig())  # of the dense layers
    hf.mlp_only_layers = []
    with pytest.raises(UserError, match="no layer of this qwen3_moe has an adapter"):
        check(hf, settings, PolicyConfig())
