"""CoreAttention against a naive float64 twin:
padded, packed, grouped heads, context parallelism, memory, refusals.

Shape legend: S positions, B sequences, T packed tokens, H query heads, G key-value heads, D head
width.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stare.policy import runtime
from megatron_stare.policy.layers.attention import CoreAttention
from megatron_stare.policy.layers.flash import SHORT
from megatron_stare.policy.layers.norm import RMSNorm
from tests.distributed import run_distributed

MIXED = [1, 70, 33, 33, 2, 64, 1, 17, 33, 5, 69]
EQUAL = [24] * 5
LONG = [SHORT + 60, SHORT + 60, 3 * SHORT, SHORT + 60, 7]
PACKS = {"mixed": MIXED, "equal": EQUAL, "long": LONG, "alone": [301], "ones": [1, 1, 1]}
EXACT = {torch.float32: 1e-5, torch.float64: 1e-12}
TINY = {"vocab": 71, "hidden": 32, "heads": 4, "groups": 2}


def packed_params(
    starts: list[int], padded: list[int] | None = None, device: str = "cpu", **fields: Any
) -> Any:
    runtime.prepare()
    from megatron.core.packed_seq_params import PackedSeqParams

    offsets = torch.tensor(starts, dtype=torch.int32, device=device)
    slots = None if padded is None else torch.tensor(padded, dtype=torch.int32, device=device)
    longest = max(stop - start for start, stop in itertools.pairwise(padded or starts))
    given = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets, "cu_seqlens_q_padded": slots}
    given |= {"cu_seqlens_kv_padded": slots, "max_seqlen_q": longest, "max_seqlen_kv": longest}
    return PackedSeqParams(**({"qkv_format": "thd"} | given | fields))


def starts_of(lengths: list[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


def core(width: int, cp_group: Any = None, **overrides: Any) -> CoreAttention:
    size = 1 if cp_group is None else cp_group.size()
    config = SimpleNamespace(context_parallel_size=size, kv_channels=width, attention_dropout=0.0)
    arguments: dict[str, Any] = {"attn_mask_type": "causal", "attention_type": "self"}
    arguments |= {"pg_collection": SimpleNamespace(cp=cp_group)}
    return CoreAttention(config, 1, **(arguments | overrides))


def random_qkv(
    tokens: tuple[int, ...], heads: int, groups: int, width: int, seed: int = 0
) -> list[Tensor]:
    """q, k, v and a gradient of out, float64;
    keys large enough that the softmax is far from uniform.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = [(*tokens, count, width) for count in (heads, groups, groups, heads)]
    return [2 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def naive(q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor) -> Tensor:
    """One sequence, written from the definition: [S, H * D]."""
    length, heads, width = q_SHD.shape
    k_SHD, v_SHD = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k_SGD, v_SGD))
    scores_HSS = torch.einsum("qhd,khd->hqk", q_SHD, k_SHD) / math.sqrt(width)
    future_SS = torch.ones(length, length, dtype=torch.bool, device=q_SHD.device).triu(1)
    weights_HSS = scores_HSS.masked_fill(future_SS, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights_HSS, v_SHD).flatten(1)


def naive_packed(lengths: list[int]) -> Callable[..., Tensor]:
    def run(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        parts = zip(*(x.split(lengths) for x in (q_THD, k_TGD, v_TGD)), strict=True)
        return torch.cat([naive(*part) for part in parts])

    return run


def naive_padded(q_SBHD: Tensor, k_SBGD: Tensor, v_SBGD: Tensor) -> Tensor:
    columns = zip(*(x.unbind(1) for x in (q_SBHD, k_SBGD, v_SBGD)), strict=True)
    return torch.stack([naive(*column) for column in columns], 1)


def with_gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """[out, dq, dk, dv] for inputs q, k, v and the gradient of out."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs[:3]]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3].reshape(out.shape))]


def error(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest difference over out, dq, dk and dv, each in units of its largest wanted value.

    Where all of one are 0 (dq and dk of lone tokens, differences of equal terms), in units of the
    largest of any.
    """
    worst, largest = 0.0, max(float(theirs.abs().max()) for theirs in wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.shape == theirs.shape
        assert torch.isfinite(mine).all()
        worst = max(
            worst, float((mine.double() - theirs).abs().max() / (theirs.abs().max() or largest))
        )
    return worst


def packed_error(
    lengths: list[int], heads: int, groups: int, width: int, dtype: Any, device: str = "cpu"
) -> float:
    inputs = [x.to(dtype).double() for x in random_qkv((sum(lengths),), heads, groups, width)]
    attention, params = core(width), packed_params(starts_of(lengths), device=device)
    found = with_gradients(
        lambda *qkv: attention(*qkv, packed_seq_params=params),
        [x.to(device, dtype) for x in inputs],
    )
    return error([x.cpu() for x in found], with_gradients(naive_packed(lengths), inputs))


def padded_error(
    length: int, batch: int, heads: int, groups: int, width: int, dtype: Any, device: str = "cpu"
) -> float:
    inputs = [x.to(dtype).double() for x in random_qkv((length, batch), heads, groups, width)]
    found = with_gradients(core(width), [x.to(device, dtype) for x in inputs])
    return error([x.cpu() for x in found], with_gradients(naive_padded, inputs))


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("length", "batch"), [(1, 3), (37, 1), (50, 7), (SHORT + 1, 3)])
def test_padded(length: int, batch: int, groups: int, dtype: Any) -> None:
    assert padded_error(length, batch, 4, groups, 12, dtype) < EXACT[dtype]


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("name", PACKS)
def test_packed(name: str, groups: int, dtype: Any) -> None:
    assert packed_error(PACKS[name], 4, groups, 12, dtype) < EXACT[dtype]


def test_bfloat16_statistics_are_fp32() -> None:
    """Rounding of the operands alone: far less than bf16 sums over 300 keys would lose."""
    assert packed_error([301, 40, 41], 4, 2, 16, torch.bfloat16) < 0.02
    assert padded_error(50, 3, 4, 2, 16, torch.bfloat16) < 0.02


def test_batch_axis_of_one_and_projection_views() -> None:
    """[T, 1, heads, D] gives [T, 1, H * D];
    values that are views into a fused projection are fine.
    """
    fused_T1X = torch.randn(sum(MIXED), 1, 2, 4 * 12, dtype=torch.float64)
    query, key, value = fused_T1X.split((24, 12, 12), dim=3)
    query = query.reshape(-1, 1, 4, 12)
    found = core(12)(query, key, value, packed_seq_params=packed_params(starts_of(MIXED)))
    assert found.shape == (sum(MIXED), 1, 48)
    torch.testing.assert_close(
        found[:, 0], naive_packed(MIXED)(query[:, 0], key[:, 0], value[:, 0])
    )


def test_padded_offsets_give_the_layout() -> None:
    """Real tokens of sequences in padded slots see their own sequence only,
    whatever stands in the padding.
    """
    lengths, slots = [5, 8, 3], [8, 8, 4]
    padded, params = starts_of(slots), packed_params(starts_of(lengths), starts_of(slots))
    q, k, v, _ = random_qkv((20,), 4, 2, 8)
    found = core(8)(q, k, v, packed_seq_params=params)
    for start, length in zip(padded, lengths, strict=False):
        own = slice(start, start + length)
        torch.testing.assert_close(found[own], naive(q[own], k[own], v[own]))


def test_offsets_changed_in_place_are_read_again() -> None:
    q, k, v, _ = random_qkv((20,), 2, 2, 8)
    attention, params = core(8), packed_params([0, 5, 20])
    attention(q, k, v, packed_seq_params=params)
    params.cu_seqlens_q[1] = 11
    torch.testing.assert_close(
        attention(q, k, v, packed_seq_params=params), naive_packed([11, 9])(q, k, v)
    )


def test_twice_the_same_bits() -> None:
    inputs, attention = random_qkv((sum(MIXED),), 4, 2, 12), core(12)
    params = packed_params(starts_of(MIXED))
    runs = [
        with_gradients(lambda *qkv: attention(*qkv, packed_seq_params=params), inputs)
        for _ in range(2)
    ]
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"attention_type": "cross"}, "attention_type"),
        ({"attn_mask_type": "padding"}, "attn_mask_type"),
    ],
)
def test_refuses_what_it_would_ignore_when_built(overrides: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        core(8, **overrides)


def refused_calls() -> dict[str, dict[str, Any]]:
    """Arguments that a call refuses, by what its message must say."""
    other_keys = torch.tensor([0, 5, 20])
    return {
        "attention_mask": {"attention_mask": torch.ones(1)},
        "attention_bias": {"attention_bias": torch.ones(1)},
        "qkv_format": {"packed_seq_params": packed_params([0, 4, 20], qkv_format="sbhd")},
        "local_cp_size": {"packed_seq_params": packed_params([0, 4, 20], local_cp_size=2)},
        "20 tokens": {"packed_seq_params": packed_params([0, 4, 19])},
        "rise": {"packed_seq_params": packed_params([0, 4, 2, 20])},
        "cu_seqlens_kv": {"packed_seq_params": packed_params([0, 4, 20], cu_seqlens_kv=other_keys)},
    }


def test_refuses_what_it_would_ignore_when_called() -> None:
    q, k, v, _ = random_qkv((20,), 2, 2, 8)
    for name, call in refused_calls().items():
        with pytest.raises(ValueError, match=name):
            core(8)(q, k, v, **call)


# Memory


@contextlib.contextmanager
def saved_storages() -> Iterator[dict[int, int]]:
    """Bytes of every storage that autograd keeps alive, by address."""
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield kept


def linear_bytes(tokens: int, heads: int, groups: int, width: int, size: int = 4) -> int:
    """q, out, k, v and the log-sum-exp."""
    return tokens * size * (2 * heads * width + 2 * groups * width + heads)


@pytest.mark.parametrize("packed", [True, False])
def test_keeps_only_its_inputs_its_output_and_the_log_sum_exp(packed: bool) -> None:
    """The value is a view into a fused projection, as Megatron's is;
    the projection must not stay alive for it.
    """
    fused = torch.randn(512, 4, 2, 4 * 16, requires_grad=True)
    query, key, value = fused.split((32, 16, 16), dim=3)
    query, key = query.reshape(512, 4, 4, 16) * 1.0, key * 1.0
    if packed:
        query, key, value = (x.flatten(0, 1) for x in (query, key, value))
    params = packed_params([0, 1000, 1100, 2048]) if packed else None
    with saved_storages() as kept:
        core(16)(query, key, value, packed_seq_params=params)
    assert sum(kept.values()) == linear_bytes(2048, 4, 2, 16)


def peak_extra_bytes(function: Callable[[], Any]) -> int:
    """Resident memory at the peak of the call, less what was resident before it."""

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)  # memory freed before would hide what is used again
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    function()
    return status("VmHWM") - before


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak counter")
def test_peak_memory_is_linear_in_tokens() -> None:
    """8k tokens in one sequence: scores would be 256 MiB per head and copy.
    The same bound catches the naive twin.
    """
    heads, width = 2, 16

    def bound(tokens: int) -> int:
        return 8 * linear_bytes(tokens, heads, heads, width) + (16 << 20)

    def step(tokens: int, function: Callable[..., Tensor]) -> int:
        inputs = [torch.randn(tokens, heads, width) for _ in range(4)]
        return peak_extra_bytes(lambda: with_gradients(function, inputs))

    attention = core(width)
    params = packed_params([0, 8000, 8192])
    assert step(8192, lambda *qkv: attention(*qkv, packed_seq_params=params)) < bound(8192)
    assert step(4096, naive) > bound(4096)


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
    """What autograd keeps of a rank's 128 tokens: its own, not the gathered keys."""
    qkv = [torch.randn(128, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    with saved_storages() as kept:
        core(16, group)(*qkv, packed_seq_params=packed_params([0, 128 * group.size()]))
    return sum(kept.values())


def _refusals(group: Any) -> int:
    """How many of two lengths that cannot be cut were taken (no
    rank communicates before it refuses).
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


# In the model


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


# RMSNorm


def norm(dtype: torch.dtype, sequence_parallel: bool = False) -> RMSNorm:
    made = RMSNorm(
        SimpleNamespace(params_dtype=dtype, sequence_parallel=sequence_parallel), 48, eps=1e-6
    )
    with torch.no_grad():
        made.weight.copy_(torch.linspace(-1, 2, 48))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_norm_is_transformers_norm(dtype: torch.dtype) -> None:
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    ours, theirs = norm(dtype), Qwen2RMSNorm(48, eps=1e-6).to(dtype)
    theirs.load_state_dict(ours.state_dict())
    x = (30 * torch.randn(5, 3, 48, generator=torch.Generator().manual_seed(0))).to(dtype)
    if dtype == torch.float64:  # transformers would drop to fp32
        wanted = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * ours.weight
    else:
        wanted = theirs(x)
    exact = {"rtol": 0, "atol": 0} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(ours(x), wanted, **exact)


def test_norm_weight_is_marked_for_sequence_parallelism() -> None:
    """finalize_model_grads sums the gradient of weights so marked,
    also after the mixed-precision wrapper's cast.
    """
    assert norm(torch.float32, True).bfloat16().weight.sequence_parallel is True
    assert norm(torch.float32, False).weight.sequence_parallel is False


# CUDA: never run where these were written


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 0.02), (torch.float16, 0.004), (torch.float32, 2e-5)]
)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_cuda(groups: int, dtype: torch.dtype, tolerance: float) -> None:
    for lengths in PACKS.values():
        assert packed_error(lengths, 4, groups, 32, dtype, "cuda") < tolerance
    assert (
        packed_error(MIXED, 4, groups, 12, dtype, "cuda") < tolerance
    )  # a width that must be padded
    assert padded_error(50, 7, 4, groups, 32, dtype, "cuda") < tolerance
    assert padded_error(300, 1, 4, groups, 64, dtype, "cuda") < tolerance
