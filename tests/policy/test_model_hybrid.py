"""A dense Qwen3 through Megatron-Core's HybridModel, which is to follow GPTModel: the same numbers.

HybridModel of the pinned version has no hook for a head of one's own, no spec but
TransformerEngine's, and its last norm is TransformerEngine's. Without a patch: it is built without
that norm; afterwards its settings say that it has one, ours, and that another module owns the
output layer, so that it returns hidden states. Every layer of a transformer is two of its layers,
one of attention and one of the MLP, so that names, layer numbers and pipeline stages are others.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_stare.config import Config, LossConfig, override
from megatron_stare.losses import find_objective
from megatron_stare.policy import build
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.cpu_layers.attention import RMSNorm
from megatron_stare.policy.topology import Topology
from tests.policy.test_actor_sequences import rounds_of_groups
from tests.tiny_models import tiny_config, write_checkpoint


class Layer(nn.Module):
    """A layer with GPTModel's names, made of HybridModel's modules."""

    def __init__(self, attention: Any, mlp: Any) -> None:
        super().__init__()
        self.input_layernorm, self.self_attention = (
            attention.input_layernorm,
            attention.self_attention,
        )
        self.pre_mlp_layernorm, self.mlp = mlp.pre_mlp_layernorm, mlp.mlp
        self.layer_number = mlp.layer_number // 2


class Decoder(nn.Module):
    def __init__(self, stack: Any) -> None:
        super().__init__()
        pairs = zip(stack.layers[::2], stack.layers[1::2], strict=True)
        self.layers = nn.ModuleList(Layer(*pair) for pair in pairs)
        self.final_layernorm = stack.final_norm


class NamedAsGPT(nn.Module):
    """A HybridModel under GPTModel's names, with its output hook."""

    pre_process = post_process = True

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.__dict__["hybrid"] = model  # its parameters are registered below, once
        self.config, self.model_type = model.config, model.model_type
        self.share_embeddings_and_output_weights = model.share_embeddings_and_output_weights
        self.embedding, self.decoder = model.embedding, Decoder(model.decoder)
        self.output_layer = model.output_layer
        model.post_process = False

    def set_input_tensor(self, tensor: Any) -> None:
        self.hybrid.set_input_tensor(tensor)

    def shared_embedding_or_output_weight(self) -> Tensor:
        return self.hybrid.shared_embedding_or_output_weight()

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        output_processor: Any,
        output_processor_context: Any,
        packed_seq_params: Any = None,
    ) -> Any:
        hidden = self.hybrid(tokens, positions, mask, packed_seq_params=packed_seq_params)
        tied = self.share_embeddings_and_output_weights
        return output_processor(
            hidden_states=hidden,
            output_layer=self.output_layer,
            output_weight=self.shared_embedding_or_output_weight() if tied else None,
            context=output_processor_context,
        )


def hybrid_chunks(hf: Any, policy: Any, topology: Topology) -> list[nn.Module]:
    """build_model for one stage, dense, without TransformerEngine."""
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    config = build.transformer_config(hf, policy, topology)
    (layer, *_) = build._layer_specs(config, policy, topology, None, local=True).layer_specs
    own = layer.submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=own.input_layernorm,
        self_attention=own.self_attention,
        self_attn_bda=own.self_attn_bda,
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=own.pre_mlp_layernorm, mlp=own.mlp, mlp_bda=own.mlp_bda
    )
    stack = ModuleSpec(
        module=HybridStack,
        params={"post_layer_norm": False},
        submodules=HybridStackSubmodules(
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
        ),
    )
    doubled = copy.deepcopy(config)
    doubled.num_layers = 2 * config.num_layers
    model = HybridModel(
        config=doubled,
        hybrid_stack_spec=stack,
        vocab_size=build.padded_vocab_size(hf, topology.tensor_size),
        max_sequence_length=hf.max_position_embeddings,
        hybrid_layer_pattern="*-" * config.num_layers,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        pg_collection=topology.groups,
        rotary_base=hf.rope_parameters["rope_theta"],
    )
    model.decoder.final_norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
    model.decoder.post_layer_norm = True
    return [NamedAsGPT(model)]


def three_updates(checkpoint: str, topology: Topology, *options: str) -> list[Any]:
    settings = (f"policy.hf_checkpoint={checkpoint}", "optimizer.lr=1e-2", *options)
    config = override(Config(), [*settings, "policy.max_tokens_per_gpu=64"])
    actor = Actor(config, topology, total_steps=3)
    objective, loss = find_objective("stare"), LossConfig(name="stare", target_entropy=10.0)
    found: list[Any] = []
    for _ in range(3):
        batch = actor.score(actor.pack(rounds_of_groups(), 0))
        signals = objective.plan(batch, loss, topology.across, {})
        metrics, _ = actor.update(batch, objective.bind(loss), signals)
        found += [metrics, batch.surprisal_T, batch.entropy_T]
    return [*found, dict(actor.weights())]


@pytest.mark.parametrize("packed", ["true", "false"])
def test_a_dense_qwen3_trains_as_through_gpt_model(
    packed: str, tmp_path: Path, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_checkpoint(tmp_path, tiny_config("qwen3"), seed=5)
    option = f"policy.packed_sequences={packed}"
    expected = three_updates(checkpoint, topology, option)
    monkeypatch.setattr(build, "build_model", hybrid_chunks)
    found = three_updates(checkpoint, topology, option)
    assert expected[0]["grad_norm"] > 0 and expected[0]["loss"] != expected[3]["loss"]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
