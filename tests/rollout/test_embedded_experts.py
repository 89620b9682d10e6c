"""The embedded engine's choices of experts, repeated by the trainer."""

import dataclasses

import pytest
import torch

from megatron_stare.config import Config, PolicyConfig
from megatron_stare.loop.metrics import missing_routing
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.build import read_hf_config
from megatron_stare.policy.experts import routing_shape
from megatron_stare.records import Group, Prompt
from megatron_stare.rollout.engine import generate
from tests.rollout.test_embedded import CONTEXT, PLAIN, VOCABULARY, engine_of, requests
from tests.tiny_models import byte_tokenizer, tiny_config, write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Weights with experts and a byte tokenizer."""
    config = tiny_config("qwen3_moe", vocab_size=VOCABULARY, max_position_embeddings=CONTEXT)
    directory = write_checkpoint(tmp_path_factory.mktemp("experts"), config, 3)
    byte_tokenizer().save_pretrained(directory)
    return directory


def routing_otherwise(model):
    """Experts chosen by other scores than those that weigh them, differently each time: what
    rounding does to near ties, and more of it.
    """
    dice = torch.Generator().manual_seed(2)

    def router(gate):
        def forward(hidden_states):
            logits = hidden_states.reshape(-1, gate.hidden_dim) @ gate.weight.t()
            noise = 0.3 * logits.std() * torch.randn(logits.shape, generator=dice)
            chosen = (logits + noise).topk(gate.top_k).indices
            return logits, torch.softmax(logits.gather(-1, chosen), -1), chosen

        return forward

    for layer in model.model.layers[1:]:
        layer.mlp.gate.forward = router(layer.mlp.gate)


@pytest.mark.parametrize("batch_size", [4, 64])
def test_a_trainer_that_replays_the_engines_experts_has_its_log_probs(
    batch_size, checkpoint, topology
):
    directory = str(checkpoint)
    shape = routing_shape(read_hf_config(directory))
    engine = engine_of(checkpoint, batch_size)
    routing_otherwise(engine.model)
    params = dataclasses.replace(PLAIN, routing=shape)
    rollouts = generate(engine, requests(), params)
    asked = requests()
    groups = [
        Group(Prompt(n, request.prompt_ids, ""), (dataclasses.replace(rollout, advantage=1.0),))
        for n, (request, rollout) in enumerate(zip(asked, rollouts, strict=True))
    ]
    assert missing_routing(groups, shape) == {"routing_missing": 0.0}
    differences = {}
    for mode in ("none", "rollout"):
        policy = PolicyConfig(hf_checkpoint=directory, max_tokens_per_gpu=200, routing_replay=mode)
        actor = Actor(Config(policy=policy), topology, total_steps=1)
        batch = actor.score(actor.pack(groups, 0))
        differences[mode] = (batch.surprisal_T + batch.rollout_logprob_T).abs()
    for mode, difference_T in differences.items():
        tail = difference_T.quantile(0.99)
        print(
            f"{mode}: mean {difference_T.mean():.2g}, 99% {tail:.2g}, max {difference_T.max():.2g}"
        )
    assert differences["none"].mean() > 0.05
    assert differences["rollout"].max() < 1e-5


def test_a_part_keeps_the_experts_that_it_was_sampled_with(checkpoint):
    shape = routing_shape(read_hf_config(str(checkpoint)))
    engine = engine_of(checkpoint)
    params = dataclasses.replace(PLAIN, routing=shape)
    asked = requests()[7]
    (whole,) = generate(engine, [asked], params)
    (part,) = generate(engine, [asked], dataclasses.replace(params, max_new_tokens=8))
    assert shape.positions(part.routing_bytes) == len(asked.prompt_ids) + 7
    (again,) = generate(engine, [dataclasses.replace(asked, part=part)], params)
    assert again.routing.tolist() == whole.routing.tolist()
    routing_otherwise(engine.model)
    (again,) = generate(engine, [dataclasses.replace(asked, part=part)], params)
    assert again.routing_bytes == shape.width * (len(asked.prompt_ids) + again.length - 1)
    assert again.routing[: part.routing_bytes].tolist() == part.routing.tolist()
    assert again.routing.tolist() != whole.routing.tolist()
