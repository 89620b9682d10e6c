"""The quickstart's world: counts, hold-out, tokenizer, checkpoint, determinism,
and what a kill leaves.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from megatron_stare.compare.worlds import mirror_grid as world
from megatron_stare.compare.worlds.files import is_complete
from megatron_stare.scoring.mirror_grid import kind_of, mirror_grid_reward, parse_label

SEED = 7


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("world")
    world.make_world(directory, SEED)
    return directory


@pytest.fixture(scope="module")
def tokenizer(made):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(made / "model")


def test_counts_and_hold_out(made):
    train, easy, hard = (
        read_rows(made / f"{name}.jsonl") for name in ("train", "heldout_easy", "heldout_hard")
    )
    assert {row["metadata"]["kind"] for row in easy} == {"easy"} and {
        row["metadata"]["kind"] for row in hard
    } == {"hard"}
    assert (len(easy), len(hard)) == (256, 256)
    kinds = [row["metadata"]["kind"] for row in train]
    assert (kinds.count("easy"), kinds.count("hard")) == (7080 - 256, 2756 - 256)
    assert "hard" in kinds[:50] and "easy" in kinds[:50], "the two kinds are mixed"
    labels = [row["label"] for row in train + easy + hard]
    assert len(set(labels)) == 7080 + 2756
    for row in train + easy + hard:
        assert row["prompt"] == row["label"] + ":"
        assert row["metadata"] == {"kind": kind_of(*parse_label(row["label"]))}


def test_demonstrations(made):
    rows = read_rows(made / "cold_start.jsonl")
    heldout = {
        row["prompt"]
        for kind in ("easy", "hard")
        for row in read_rows(made / f"heldout_{kind}.jsonl")
    }
    assert len(rows) == 400 * 128
    assert not heldout & {row["prompt"] for row in rows}
    assert all(row["response"].endswith(".") and 4 <= len(row["response"]) <= 25 for row in rows)
    right = [mirror_grid_reward(row["response"], row["prompt"][:-1], {}) for row in rows]
    assert sum(right) / len(rows) == pytest.approx(0.395, abs=0.01)
    moves = "".join(row["response"] for row in rows)
    assert 0 < moves.count("r") < moves.count("e") / 3, "r is shown, and rare"


def test_the_demonstrator_stops_at_the_target_and_keeps_the_grammar():
    rng = random.Random(0)
    for _ in range(500):
        response = world.demonstrate((3, 4), (5, 5), rng)
        states = [response[at + 1 : at + 3] for at in range(0, len(response) - 1, 3)]
        assert "55" not in states[:-1]
        assert set(response[0:-1:3]) <= set("enswrf")


def test_tokenizer(made, tokenizer):
    text = "34>87:"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) == 6
    everything = world.CHARACTERS * 2
    ids = tokenizer(everything)["input_ids"]
    assert len(ids) == len(everything) and tokenizer.decode(ids) == everything
    assert tokenizer.pad_token_id == 0 and tokenizer.pad_token_id not in ids
    assert tokenizer.decode([tokenizer.eos_token_id]) == "."
    assert len(tokenizer) == len(world.CHARACTERS) + 1 == 20, "no id beyond the model's vocabulary"
    assert world.character_tokenizer().encode(everything) == ids, (
        "AutoTokenizer reads what was made"
    )
    for row in read_rows(made / "cold_start.jsonl")[:500]:
        assert len(tokenizer.encode(row["response"])) <= 3 * world.MAX_MOVES + 1


def test_checkpoint(made, tokenizer):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    weights = load_file(made / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert "lm_head.weight" in weights and not torch.equal(
        weights["lm_head.weight"], weights["model.embed_tokens.weight"]
    )
    config = json.loads((made / "model" / "config.json").read_text())
    shape = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
    )
    assert [config[key] for key in shape] == [64, 2, 4, 2, 192]
    assert (
        config["architectures"] == ["Qwen2ForCausalLM"] and config["tie_word_embeddings"] is False
    )
    generation = json.loads((made / "model" / "generation_config.json").read_text())
    for loaded in (config, generation):
        assert (loaded["eos_token_id"], loaded["pad_token_id"]) == (
            tokenizer.eos_token_id,
            tokenizer.pad_token_id,
        )
    model = AutoModelForCausalLM.from_pretrained(made / "model")
    assert model.config.rope_parameters["rope_theta"] == 1000.0
    with torch.no_grad():
        assert model(torch.tensor([tokenizer.encode("34>87:")])).logits.shape == (1, 6, 20)


def test_the_seed_decides_every_byte(made, tmp_path):
    import torch

    before = torch.random.get_rng_state()
    world.make_world(tmp_path / "same", SEED)
    assert torch.equal(torch.random.get_rng_state(), before), (
        "the caller's random state is left alone"
    )
    assert contents(tmp_path / "same") == contents(made)
    world.make_world(tmp_path / "same", SEED + 1)
    other = contents(tmp_path / "same")
    assert other.keys() == contents(made).keys()
    assert [
        name for name, data in contents(made).items() if other[name] == data and "model" not in name
    ] == []


def test_a_complete_world_is_kept_and_a_broken_one_is_repaired(made):
    train, whole = made / "train.jsonl", contents(made)
    modified = train.stat().st_mtime_ns
    world.make_world(made, SEED)
    assert train.stat().st_mtime_ns == modified
    (made / "world.json").unlink()  # what a kill leaves: some files, no world.json
    (made / "heldout_hard.jsonl").unlink()
    assert not is_complete(made, world.WORLD_VERSION, SEED)
    world.make_world(made, SEED)
    assert contents(made) == whole
    (made / "world.json").write_text('{"version": 1, "se')
    assert not is_complete(made, world.WORLD_VERSION, SEED)
    world.make_world(made, SEED)
    assert contents(made) == whole
