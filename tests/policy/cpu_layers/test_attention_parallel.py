"""Context parallelism and whole models equal the single rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stare.policy import runtime
from megatron_stare.policy.cpu_layers.attention import CoreAttention, RMSNorm
from tests.distributed import run_distributed
from tests.policy.cpu_layers.attention_cases import (
    EXACT,
    PACKS,
    core,
    error,
    linear_bytes,
    naive,
    naive_packed,
    naive_padded,
    packed_params,
    random_qkv,
    saved_storages,
    starts_of,
    with_gradients,
)

TINY = {"vocab": 71, "hidden": 32, "heads": 4, "groups": 2}


# Context parallelism: every rank checks its own share of the whole


def zigzag_rows(lengths: list[int], size: int, rank: int) -> Tensor:
    """The positions of the whole batch that a rank holds, in its order."""
    rows, start = [], 0
    for length in lengths:
        chunks = torch.arange(start, start + length).chunk(2 * size)
        rows += [chunks[rank], chunks[2 * size - 1 - rank]]
        start += length
    return torch.cat(rows)


def check_in_pairs_and_all_together(rank: int, world_size: int) -> dict[str, float]:
    """Four ranks as two context groups of two, whose ranks differ from those in the world,
    and as one of four.
    """
    runtime.prepare()
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world_size, 2)]
    found: dict[str, float] = {}
    for group in (pairs[rank // 2], dist.group.WORLD):
        found |= {
            f"cp={group.size()} {name}": units
            for name, units in check_context_parallel(group).items()
        }
    return found | {"model": _model_error(pairs[rank // 2]) / 1e-5}


def check_context_parallel(group: Any) -> dict[str, float]:
    """Errors by case, in units of their tolerance;
    the packs are scaled so that every length can be cut.
    """
    rank, size, found = group.rank(), group.size(), {}
    for name, groups, dtype in itertools.product(("mixed", "equal", "ones"), (1, 4), EXACT):
        lengths = [length * 2 * size for length in PACKS[name]]
        inputs = random_qkv((sum(lengths),), 4, groups, 12)
        mine_T = zigzag_rows(lengths, size, rank)
        wanted = [x[mine_T] for x in with_gradients(naive_packed(lengths), inputs)]
        attention, params = core(12, group), packed_params(starts_of(lengths))
        share = [x[mine_T].to(dtype) for x in inputs]
        got = with_gradients(
            lambda *qkv, a=attention, p=params: a(*qkv, packed_seq_params=p), share
        )
        found[f"packed {name} {groups} {dtype}"] = error(got, wanted) / EXACT[dtype]
    for length, batch, dtype in itertools.product((1, 40), (1, 3), EXACT):
        inputs = random_qkv((length * 2 * size, batch), 4, 2, 12)
        mine_S = zigzag_rows([length * 2 * size], size, rank)
        wanted = [x[mine_S] for x in with_gradients(naive_padded, inputs)]
        got = with_gradients(core(12, group), [x[mine_S].to(dtype) for x in inputs])
        found[f"padded {length} {batch} {dtype}"] = error(got, wanted) / EXACT[dtype]
    inputs = random_qkv((64 * size,), 4, 2, 16)
    share = [x[zigzag_rows([64 * size], size, rank)].bfloat16() for x in inputs]
    half = with_gradients(
        lambda *qkv: core(16, group)(*qkv, packed_seq_params=packed_params([0, 64 * size])), share
    )
    whole = with_gradients(naive, [x.bfloat16().double() for x in inputs])
    found["bf16"] = error(half, [x[zigzag_rows([64 * size], size, rank)] for x in whole]) / 0.03
    found["not Megatron's order"] = float(
        _megatron_rows(24 * size, group) != zigzag_rows([24 * size], size, rank).tolist()
    )
    found["kept bytes"] = float(_kept_share(group) != linear_bytes(128, 4, 2, 16))
    found["refusals"] = float(_refusals(group))
    return found


def _megatron_rows(length: int, group: Any) -> list[int]:
    from megatron.core.utils import get_batch_on_this_cp_rank

    batch = {"position_ids": torch.arange(length).unsqueeze(0), "cu_seqlens": None}
    return get_batch_on_this_cp_rank(batch, False, cp_group=group)["position_ids"][0].tolist()


def _kept_share(group: Any) -> int:
    """Autograd's memory of a rank's 128 tokens: its own keys, not the gathered ones."""
    qkv = [torch.randn(128, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    with saved_storages() as kept:
        core(16, group)(*qkv, packed_seq_params=packed_params([0, 128 * group.size()]))
    return sum(kept.values())


def _refusals(group: Any) -> int:
    """The number of two indivisible lengths that were accepted (no rank communicates before it
    refuses).
    """
    taken = 0
    size = group.size()
    for length, params in ((3, None), (4 * size, packed_params([0, 1, 4 * size * size]))):
        query = torch.randn(length, 2, 8) if params else torch.randn(length, 1, 2, 8)
        try:
            core(8, group)(query, query, query, packed_seq_params=params)
            taken += 1
        except ValueError as refusal:
            taken += f"2 * {'context_parallel_size' if params else size}" not in str(refusal)
    return taken


def test_context_parallel_equals_the_whole() -> None:
    ranks = run_distributed(check_in_pairs_and_all_together, 4)
    worst = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
    assert {name: units for name, units in worst.items() if not units < 1} == {}


def tiny_model(cp: int) -> Any:
    """A Qwen2-shaped GPTModel of Megatron with our attention and norm;
    every rank has the same weights.
    """
    runtime.prepare()
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        context_parallel_size=cp, create_gloo_process_groups=False
    )
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=TINY["hidden"],
        ffn_hidden_size=44,
        num_attention_heads=TINY["heads"],
        num_query_groups=TINY["groups"],
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        context_parallel_size=cp,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
    spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    spec.submodules.self_attention.submodules.core_attention = CoreAttention
    model = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=[spec] * 2, layer_norm=RMSNorm
        ),
        vocab_size=TINY["vocab"],
        max_sequence_length=512,
        position_embedding_type="rope",
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def _alone(model: Any, lengths: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """(tokens, logits) of each sequence,
    the model run on each by itself as a padded batch of one.
    """
    generator = torch.Generator().manual_seed(5)
    tokens = [torch.randint(0, TINY["vocab"], (length,), generator=generator) for length in lengths]
    with torch.no_grad():
        return tokens, [
            model(x.unsqueeze(0), torch.arange(len(x)).unsqueeze(0), None)[0] for x in tokens
        ]


def _model_error(group: Any) -> float:
    """Logits and gradient of the whole packed model on this rank
    against single sequences on a cp=1 model.
    """
    rank, size = group.rank(), group.size()
    lengths = [length * 2 * size for length in (3, 16, 1, 16)]
    single = tiny_model(1)
    tokens, logits = _alone(single, lengths)
    weights = torch.linspace(0.5, 1.5, sum(lengths)).unsqueeze(1)
    loss = sum(
        (single(x.unsqueeze(0), None, None)[0].log_softmax(-1)[:, :1] * weight).sum()
        for x, weight in zip(tokens, weights.split(lengths), strict=True)
    )
    wanted = torch.autograd.grad(loss, list(single.parameters()))
    model, mine_T = tiny_model(size), zigzag_rows(lengths, size, rank)
    params = packed_params(starts_of(lengths))
    found = model(torch.cat(tokens)[mine_T].unsqueeze(0), None, None, packed_seq_params=params)[0]
    gradients = torch.autograd.grad(
        (found.log_softmax(-1)[:, :1] * weights[mine_T]).sum(), list(model.parameters())
    )
    for gradient in gradients:
        dist.all_reduce(gradient, group=group)
    return max(
        error([found], [torch.cat(logits)[mine_T].double()]),
        error(list(gradients), [x.double() for x in wanted]),
    )


@pytest.fixture
def lonely_world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.usefixtures("lonely_world")
def test_model_on_packed_sequences_equals_padded_batches() -> None:
    """RoPE restarts at every sequence, attention stays inside it:
    logits equal those of each sequence alone.
    """
    model, lengths = tiny_model(1), [19, 1, 64, 30]
    tokens, logits = _alone(model, lengths)
    padded_BS = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=7)
    with torch.no_grad():
        packed = model(
            torch.cat(tokens).unsqueeze(0),
            None,
            None,
            packed_seq_params=packed_params(starts_of(lengths)),
        )
        padded = model(padded_BS, None, None)
    torch.testing.assert_close(packed[0], torch.cat(logits), rtol=1e-5, atol=1e-5)
    for row, wanted in zip(padded, logits, strict=True):
        torch.testing.assert_close(row[: len(wanted)], wanted, rtol=1e-5, atol=1e-5)
