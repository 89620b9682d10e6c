"""Adapters as PEFT's directories and merged weights: out of a run's checkpoint and into a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PretrainedConfig

from megatron_stare.__main__ import main
from megatron_stare.config import AdaptersConfig, UserError
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.huggingface.peft_files import CONFIG, WEIGHTS, PeftDirectory
from megatron_stare.policy.huggingface.weights import content_fingerprint
from tests.distributed import run_distributed
from tests.policy.conversion.conftest import refused
from tests.policy.test_adapters import EP, LATENT, PP, RANK, SP, SPREAD, TP, WHOLE
from tests.policy.test_adapters_experts import in_one_tensor
from tests.policy.test_optimizer_state import actor_of, save, update
from tests.tiny_models import tiny_config, write_checkpoint

ALPHA = "adapters.alpha=7.5"


def train(rank: int, world_size: int, folder: str, *options: str) -> dict[str, torch.Tensor]:
    """A checkpoint under TP2; what engines would receive."""
    place = Path(folder)
    actor = actor_of(place / "model", "fp32", (RANK, ALPHA, TP, SP, SPREAD, *options))
    for _ in range(2):
        update(actor)
    save(actor, place / "run")
    return {name: tensor.clone() for name, tensor in actor.weights()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("peft"), tiny_config("qwen2_tied", vocab_size=71))


def written(place: Path, hf: PretrainedConfig, *options: str) -> Path:
    """model/, run/ (its adapters under TP2), merged.pt, peft/ and hf/ that `convert` wrote."""
    write_checkpoint(place / "model", hf)
    torch.save(run_distributed(train, 2, str(place), *options)[0], place / "merged.pt")
    shutil.copy(place / "model" / "config.json", place / "run")
    assert main(["convert", "megatron-to-peft", f"{place}/run", f"{place}/peft"]) == 0
    assert main(["convert", "megatron-to-hf", f"{place}/run", f"{place}/hf"]) == 0
    return place


@pytest.fixture
def settings(run: Path) -> Iterator[tuple[str, ...]]:
    """The settings of a run that starts with peft/, in this process."""
    yield (RANK, ALPHA, f"adapters.start={run / 'peft'}")
    topologies.stop()


def merged_by_peft(place: Path) -> dict[str, torch.Tensor]:
    """The weights of place/model with place/peft, by peft itself."""
    from peft import PeftModel  # here, because the ranks import this file too

    base = AutoModelForCausalLM.from_pretrained(place / "model")
    return PeftModel.from_pretrained(base, str(place / "peft")).merge_and_unload().state_dict()


def test_peft_loads_what_convert_wrote(run: Path) -> None:
    theirs = merged_by_peft(run)
    merged, sent = load_file(run / "hf" / "model.safetensors"), torch.load(run / "merged.pt")
    before = load_file(run / "model" / "model.safetensors")
    assert merged.keys() == sent.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-5, atol=1e-7)
        assert torch.equal(tensor, sent[name]), name
        assert torch.equal(tensor, before[name]) != name.endswith("proj.weight"), name


def test_adapters_of_latent_attention_go_to_peft_and_back(tmp_path: Path) -> None:
    place = written(tmp_path, tiny_config("deepseek_v3", vocab_size=71), LATENT)
    theirs = merged_by_peft(place)
    merged, before = (load_file(place / name / "model.safetensors") for name in ("hf", "model"))
    moved = {name for name, tensor in merged.items() if not torch.equal(tensor, before[name])}
    leaves = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    assert {name.split(".")[-2] for name in moved} == leaves and len(moved) == 4 * len(leaves)
    for name in moved:
        torch.testing.assert_close(merged[name], theirs[name], rtol=1e-5, atol=1e-7)
    assert run_distributed(start_under, 2, str(place), LATENT) == [[True, True]] * 2


@pytest.mark.parametrize("kind", ["each", "shared"])
def test_adapters_of_experts_go_to_peft_and_back(kind: str, tmp_path: Path) -> None:
    """PEFT puts a layer's experts into one tensor. It does so with every gate, up and down, and
    loses those of dense layers, so that the model here has none.
    """
    chosen = ("adapters.targets=gate,up,down", f"adapters.experts={kind}", WHOLE)
    hf = tiny_config("qwen3_moe", vocab_size=71, mlp_only_layers=[])
    place = written(tmp_path, hf, EP, *chosen)
    theirs = merged_by_peft(place)
    merged, before = (load_file(place / name / "model.safetensors") for name in ("hf", "model"))
    sent = torch.load(place / "merged.pt")
    for name, tensor in merged.items():
        assert torch.equal(tensor, sent[name]), name
        assert torch.equal(tensor, before[name]) == (".mlp." not in name or ".gate.w" in name), name
    for name, tensor in in_one_tensor(merged, theirs).items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-5, atol=1e-7)
    assert run_distributed(start_under, 2, str(place), EP, *chosen) == [[True, True]] * 2
    if kind == "each":
        config = AdaptersConfig(3, 7.5, targets="gate,up,down", experts="shared")
        with pytest.raises(UserError, match=r"other values in .*experts\.1\.gate_proj\.lora_A"):
            PeftDirectory(place / "peft").check(hf, config)


def test_a_run_that_starts_with_a_peft_directory_gives_every_byte_back(
    run: Path, settings: tuple[str, ...], tmp_path: Path
) -> None:
    actor = actor_of(run / "model", "fp32", settings)
    merged = load_file(run / "hf" / "model.safetensors")
    for name, tensor in actor.weights():
        assert torch.equal(tensor, merged[name]), name
    save(actor, tmp_path / "again")
    update(actor)  # they train
    shutil.copy(run / "model" / "config.json", tmp_path / "again")
    assert main(["convert", "megatron-to-peft", f"{tmp_path}/again", f"{tmp_path}/peft"]) == 0
    for file in (WEIGHTS, CONFIG):
        assert (tmp_path / "peft" / file).read_bytes() == (run / "peft" / file).read_bytes()


def start_under(rank: int, world_size: int, folder: str, *more: str) -> list[bool]:
    """Whether a run that starts with peft/ under TP2 and PP2 sends what its writer sent."""
    place, found = Path(folder), []
    for layout in ((TP, SP), (PP,)):
        fitting = [each for each in more if each != EP or PP not in layout]  # two ranks in all
        options = (RANK, ALPHA, f"adapters.start={place / 'peft'}", *layout, *fitting)
        actor = actor_of(place / "model", "fp32", options)
        sent = torch.load(place / "merged.pt")
        found.append(all(torch.equal(tensor, sent[n]) for n, tensor in actor.weights()))
    return found


def test_a_peft_directory_is_a_start_under_every_layout(run: Path) -> None:
    assert run_distributed(start_under, 2, str(run)) == [[True, True]] * 2


def test_a_directory_of_peft_itself_is_a_start(run: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base = AutoModelForCausalLM.from_pretrained(run / "model")
    wanted = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "up_proj"])
    theirs = get_peft_model(base, wanted)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    theirs.save_pretrained(tmp_path / "theirs")
    options = ("adapters.rank=2", "adapters.alpha=4", "adapters.targets=q,up")
    actor = actor_of(run / "model", "fp32", (*options, f"adapters.start={tmp_path / 'theirs'}"))
    merged = theirs.merge_and_unload().state_dict()
    for name, tensor in actor.weights():
        torch.testing.assert_close(tensor, merged[name], rtol=1e-5, atol=1e-7)
    topologies.stop()


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"rank": 4}, "says 3, and adapters.rank=4"),
        ({}, {"alpha": 8.0}, "says 7.5, and adapters.alpha=8.0"),
        ({}, {"targets": "q,k,v"}, "down_proj.lora_A.weight, which the run would not have"),
        ({"use_rslora": True}, {}, "has use_rslora=True, which is not supported"),
        ({"rank_pattern": {"q_proj": 8}}, {}, "has rank_pattern={'q_proj': 8}"),
        ({"bias": "all"}, {}, "has bias=all"),
        ({"init_lora_weights": "pissa_niter_4"}, {}, "has init_lora_weights=pissa_niter_4"),
    ],
)
def test_another_start_is_refused(
    changes: dict[str, object],
    options: dict[str, object],
    message: str,
    run: Path,
    tmp_path: Path,
) -> None:
    shutil.copytree(run / "peft", tmp_path / "peft")
    content = json.loads((tmp_path / "peft" / CONFIG).read_text()) | changes
    (tmp_path / "peft" / CONFIG).write_text(json.dumps(content))
    config = AdaptersConfig(**{"rank": 3, "alpha": 7.5} | options)  # type: ignore[arg-type]
    found = PeftDirectory(tmp_path / "peft")
    with pytest.raises(UserError) as error:
        found.check(tiny_config("qwen2_tied", vocab_size=71), config)
    assert message in str(error.value)


def test_a_run_does_not_start_from_the_checkpoint_of_adapters(run: Path) -> None:
    with pytest.raises(UserError, match=r"adapters without their base; .* megatron-to-hf .*/run"):
        actor_of(run / "run", "fp32", ())
    topologies.stop()


def test_a_directory_of_another_model_is_refused(run: Path, tmp_path: Path) -> None:
    found, config = PeftDirectory(run / "peft"), AdaptersConfig(rank=3, alpha=7.5)
    with pytest.raises(UserError, match=r"has no .*layers\.2\."):
        found.check(tiny_config("qwen2_tied", num_hidden_layers=4), config)
    with pytest.raises(UserError, match=r"with shape \(44, 3\) in F32, and the model"):
        found.check(tiny_config("qwen2_tied", intermediate_size=40), config)
    with pytest.raises(UserError, match=r"adapter_config.json cannot be read"):
        PeftDirectory(tmp_path)
    shutil.copy(run / "peft" / CONFIG, tmp_path)  # next to it adapter_model.bin, of an old peft
    with pytest.raises(UserError, match=r"has no adapter_model.safetensors; save the adapters"):
        PeftDirectory(tmp_path)


def test_convert_refuses_unsupported_conversions(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run / "model", tmp_path / "other")
    write_checkpoint(tmp_path / "other", tiny_config("qwen2_tied", vocab_size=71), seed=1)
    to_hf = ["convert", "megatron-to-hf", str(run / "run"), str(tmp_path / "target")]
    refused(capsys, [*to_hf, "--base", f"{tmp_path}/other"], "adapters of other weights", "--base")
    refused(capsys, [*to_hf, "--base", f"{tmp_path}/none"], "which is not a directory")
    refused(capsys, [*to_hf, "--verify"], "--verify compares whole checkpoints")
    to_peft = ["convert", "megatron-to-peft", str(run / "run"), str(tmp_path / "target")]
    refused(capsys, [*to_peft, "--base", f"{tmp_path}/other"], "--base belongs to megatron-to-hf")
    assert not (tmp_path / "target").exists()
    shutil.copytree(run / "model", tmp_path / "moved")
    assert main([*to_hf, "--base", f"{tmp_path}/moved"]) == 0
    written = (tmp_path / "target" / "model.safetensors").read_bytes()
    assert written == (run / "hf" / "model.safetensors").read_bytes()
    assert main(["convert", "hf-to-megatron", f"{run}/model", f"{tmp_path}/whole"]) == 0
    whole = ["convert", "megatron-to-peft", f"{tmp_path}/whole", f"{tmp_path}/peft"]
    refused(capsys, whole, "holds whole weights and no adapters")
    assert not (tmp_path / ".peft.converting").exists()
    assert main([*to_hf[:3], f"{tmp_path}/same", "--base", f"{tmp_path}/whole"]) == 0
    assert (tmp_path / "same" / "model.safetensors").read_bytes() == written


def test_the_fingerprint_sees_two_values_that_change_places(run: Path) -> None:
    actor = actor_of(run / "model", "fp32", (RANK,))
    prints = [content_fingerprint(actor.chunks, actor.hf, actor.topology)]
    for name in ("linear_qkv", "linear_proj"):
        weight = getattr(actor.chunks[0].decoder.layers[1].self_attention, name).weight
        with torch.no_grad():
            weight[0, :2] = weight[0, :2].flip(0)
        prints.append(content_fingerprint(actor.chunks, actor.hf, actor.topology))
    assert len(set(prints)) == 3
    topologies.stop()
