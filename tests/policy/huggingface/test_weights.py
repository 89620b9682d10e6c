"""Hugging Face checkpoints in and out of Megatron:
the same logits, the same bits, and refusals that name the field.

The spawned part runs every family at TP=2 in one world of two ranks.
"""

import dataclasses
import json

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron_stare.config import PolicyConfig, UserError
from megatron_stare.policy import build, topology
from megatron_stare.policy.conversion.convert import export_hf
from megatron_stare.policy.huggingface import checkpoint as hf_checkpoint
from megatron_stare.policy.huggingface import weights as hf_weights
from megatron_stare.policy.model import PolicyModel
from tests.counted_files import CountedFile
from tests.distributed import run_distributed
from tests.memory import peak_bytes
from tests.tiny_models import reference_logits, tiny_config, write_checkpoint

FAMILIES = [
    "qwen2",
    "qwen2_tied",
    "qwen3",
    "qwen3_tied",
    "llama",
    "llama3_rope",
    "mistral",
    "smollm3",
    "seed_oss",
    "glm4_moe",
    "dots1",
    "qwen3_moe",
    "qwen3_moe_stepped",
]
LENGTHS = {
    "llama3_rope": 300
}  # long enough that the slow frequencies, which the scaling changes, show


@pytest.fixture(scope="module")
def alone():
    """One process, one rank."""
    yield topology.start(PolicyConfig())
    topology.stop()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """family -> directory."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        family: write_checkpoint(root / family, tiny_config(family), seed)
        for seed, family in enumerate(FAMILIES)
    }


@pytest.fixture
def qwen2(tmp_path):
    """A directory of its own, to be damaged."""
    return write_checkpoint(tmp_path / "model", tiny_config("qwen2"))


def loaded(directory, place, policy=None):
    hf = build.read_hf_config(str(directory))
    chunks = [chunk.eval() for chunk in build.build_model(hf, policy or PolicyConfig(), place)]
    hf_weights.load_hf(chunks, str(directory), hf, place)
    return hf, chunks


def token_ids(family, batch=3):
    generator = torch.Generator().manual_seed(7)
    return torch.randint(71, (batch, LENGTHS.get(family, 24)), generator=generator)


def megatron_logits(chunks, ids_BS):
    (model,) = chunks
    positions = torch.arange(ids_BS.shape[1]).expand_as(ids_BS)
    with torch.no_grad():
        return model(ids_BS, positions, None)


def stored(directory):
    """Every tensor in the directory's files."""
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def assert_same_tensors(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family, checkpoints, alone):
    ids_BS = token_ids(family)
    expected = reference_logits(checkpoints[family], ids_BS)
    _, model = loaded(checkpoints[family], alone)
    assert expected.std() > 0.5
    torch.testing.assert_close(megatron_logits(model, ids_BS), expected, atol=1e-5, rtol=0)


def test_the_llama3_case_would_notice_missing_scaling(checkpoints, tmp_path, alone):
    plain = write_checkpoint(
        tmp_path,
        tiny_config(
            "llama", head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 500000.0}
        ),
    )
    save_file(
        stored(checkpoints["llama3_rope"]), plain / "model.safetensors", metadata={"format": "pt"}
    )
    ids_BS = token_ids("llama3_rope")
    difference = reference_logits(plain, ids_BS) - reference_logits(
        checkpoints["llama3_rope"], ids_BS
    )
    assert difference.abs().max() > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_come_back_bit_for_bit(family, checkpoints, alone):
    hf, model = loaded(checkpoints[family], alone)
    assert_same_tensors(dict(hf_weights.HFWeights(model, hf, alone)), stored(checkpoints[family]))


def test_a_checkpoint_in_several_files(tmp_path, alone):
    directory = write_checkpoint(tmp_path, tiny_config("qwen2"), max_shard_size="20KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    hf, model = loaded(directory, alone)
    assert_same_tensors(dict(hf_weights.HFWeights(model, hf, alone)), stored(directory))


def test_bf16_weights_in_a_bf16_model_come_back_bit_for_bit(tmp_path, alone):
    directory = write_checkpoint(tmp_path, tiny_config("qwen3"))
    half = {name: tensor.bfloat16() for name, tensor in stored(directory).items()}
    save_file(half, directory / "model.safetensors", metadata={"format": "pt"})
    hf, model = loaded(directory, alone, PolicyConfig(dtype="bf16"))
    assert_same_tensors(dict(hf_weights.HFWeights(model, hf, alone)), half)


def exported(directory, policy, place):
    """The tensors that export_hf writes, and the memory that it takes here [bytes]."""
    model = PolicyModel(str(directory), policy, place, 1.0)
    target = directory.with_name(f"{directory.name}-exported")
    peak = peak_bytes(lambda: export_hf(model, directory, target))
    dist.barrier()
    return stored(target), peak


def at_tensor_parallel_two(rank, world_size, directories):
    """Per family: this rank's slice of the logits, every tensor that HFWeights gives, those that
    arrive on rank 0 alone, the bytes read from files and those of the parameters.
    """
    hf_checkpoint.safe_open = CountedFile
    policy = PolicyConfig(tensor_model_parallel_size=world_size)
    place = topology.start(policy)
    outcome = {}
    for family, directory in directories.items():
        # which Megatron-Core splits by tensors only together with the sequence
        has_experts = "moe" in family or family == "dots1"
        CountedFile.count = 0
        hf, model = loaded(
            directory, place, dataclasses.replace(policy, sequence_parallel=has_experts)
        )
        shard = megatron_logits(model, token_ids(family)).contiguous()
        shards = [torch.empty_like(shard) for _ in range(world_size)]
        dist.all_gather(shards, shard, group=place.tensor)
        read = CountedFile.count
        onto_first = dict(hf_weights.HFWeights(model, hf, place, onto_first=True))
        held = sum(weight.nbytes for weight in hf_weights.named_parameters(model).values())
        everywhere = dict(hf_weights.HFWeights(model, hf, place))
        outcome[family] = (torch.cat(shards, dim=-1), everywhere, onto_first, read, held)
    outcome["exported"] = exported(directories["qwen3"], policy, place)
    return outcome | {
        "reference": {
            family: reference_logits(directories[family], token_ids(family)) for family in FAMILIES
        }
    }


@pytest.fixture(scope="module")
def two_ranks(checkpoints):
    return run_distributed(at_tensor_parallel_two, 2, checkpoints)


def test_two_tensor_parallel_ranks_give_the_same_logits_and_bits(checkpoints, two_ranks):
    for family, directory in checkpoints.items():
        expected = reference_logits(directory, token_ids(family))
        for number, outcome in enumerate(two_ranks):
            logits, tensors, onto_first, _, _ = outcome[family]
            assert logits.shape[-1] == 72, "71 rows, padded to a multiple of 2"
            torch.testing.assert_close(logits[..., :71], expected, atol=1e-5, rtol=0)
            assert_same_tensors(tensors, stored(directory))
            assert_same_tensors(onto_first, {} if number else stored(directory))
            # A process that first prepared Megatron must still load transformers models rightly.
            torch.testing.assert_close(outcome["reference"][family], expected, atol=1e-5, rtol=0)


def test_a_rank_reads_its_own_shards_bytes_and_no_others(checkpoints, two_ranks):
    for family in checkpoints:
        for number, outcome in enumerate(two_ranks):
            _, _, _, read, held = outcome[family]
            vocabularies = 1 if family.endswith("tied") else 2
            padding = number * vocabularies * 32 * 4  # one row of each, on the last rank
            assert read == held - padding


def test_an_export_holds_one_tensor_on_the_first_rank_and_none_on_others(checkpoints, two_ranks):
    expected = stored(checkpoints["qwen3"])
    largest = max(tensor.nbytes for tensor in expected.values())
    for number, outcome in enumerate(two_ranks):
        tensors, peak = outcome["exported"]
        assert_same_tensors(tensors, expected)
        # rank 0: the shards, what they are joined to, and the tensor before
        assert peak <= (largest if number else 3 * largest) + 4096


def refused(directory, place, *names, policy=None):
    """Loading is refused in one line that holds every one of `names`."""
    with pytest.raises(UserError) as caught:
        loaded(directory, place, policy)
    message = str(caught.value)
    assert "\n" not in message
    for name in names:
        assert name in message


def rewrite_config(directory, **changes):
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def rewrite_weights(directory, change):
    tensors = stored(directory)
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def test_a_directory_without_a_checkpoint_is_refused(tmp_path, alone):
    refused("", alone, "policy.hf_checkpoint")
    refused(tmp_path / "nowhere", alone, "nowhere", "config.json")


@pytest.mark.parametrize("kind", ["gpt2", "mixtral", "no_such_model"])
def test_a_foreign_model_type_is_refused(kind, qwen2, alone):
    rewrite_config(qwen2, model_type=kind)
    refused(qwen2, alone, kind)


@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.bias"],
)
def test_a_missing_tensor_is_named(name, qwen2, alone):
    rewrite_weights(qwen2, lambda tensors: tensors.pop(name))
    refused(qwen2, alone, name)


def test_an_extra_tensor_is_named(qwen2, alone):
    name = "model.layers.0.self_attn.o_proj.bias"
    rewrite_weights(qwen2, lambda tensors: tensors.update({name: torch.ones(3)}))
    refused(qwen2, alone, name)


def test_superfluous_tensors_are_ignored(tmp_path, alone):
    directory = write_checkpoint(tmp_path, tiny_config("qwen2_tied"))
    before = stored(directory)

    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = 10_000.0 ** -(torch.arange(4) / 4)

    rewrite_weights(directory, add)
    hf, model = loaded(directory, alone)
    assert_same_tensors(dict(hf_weights.HFWeights(model, hf, alone)), before)


@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.down_proj.weight", "model.layers.0.input_layernorm.weight"]
)
def test_a_wrong_shape_is_named(name, qwen2, alone):
    rewrite_weights(qwen2, lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))
    refused(qwen2, alone, name, "shape")


@pytest.mark.parametrize("keep", [0, 4, 200, -100])
def test_a_truncated_file_is_refused(keep, qwen2, alone):
    file = qwen2 / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:keep])
    refused(qwen2, alone, "model.safetensors")


def test_safetensors_refuses_the_truncated_file_too(qwen2):
    file = qwen2 / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with (
        pytest.raises(Exception, match=r"(?i)incomplete|invalid|header"),
        safe_open(file, framework="pt"),
    ):
        pass


def test_a_foreign_rope_in_the_old_spelling_is_refused(qwen2, alone):
    content = json.loads((qwen2 / "config.json").read_text())
    content.pop("rope_parameters", None)
    content |= {
        "rope_theta": 1e6,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    }
    (qwen2 / "config.json").write_text(json.dumps(content))
    refused(qwen2, alone, "yarn")


@pytest.mark.parametrize(
    ("size", "field"),
    [(3, "num_attention_heads"), (4, "num_key_value_heads"), (8, "num_attention_heads")],
)
def test_heads_not_divisible_by_tensor_parallel_ranks_are_refused(size, field, qwen2, alone):
    policy = PolicyConfig(tensor_model_parallel_size=size)
    refused(qwen2, alone, field, "tensor_model_parallel_size", policy=policy)


def test_an_intermediate_size_not_divisible_by_ranks_is_refused(tmp_path, alone):
    directory = write_checkpoint(tmp_path, tiny_config("qwen2", intermediate_size=45))
    policy = PolicyConfig(tensor_model_parallel_size=2)
    refused(directory, alone, "intermediate_size", "tensor_model_parallel_size", policy=policy)


def test_more_ranks_than_processes_are_refused():
    with pytest.raises(UserError, match=r"policy\.tensor_model_parallel_size=2"):
        topology.start(PolicyConfig(tensor_model_parallel_size=2))
