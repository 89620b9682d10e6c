"""Gated delta nets on an SGLang server without a GPU.

SGLang has a path for CPUs that calls kernels of a wheel made for AMX. `install` puts operations in
torch in their places: the delta rule token by token, the convolution, gates and norms. Loading,
fusing, splitting, caches of states and updates of weights are SGLang's own.

Shape legend: T tokens of all sequences, H query and key heads, N value heads, K and V widths of
keys and values, D channels of the convolution, W its taps. States of a sequence: [N, V, K].
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu, softplus


def install() -> None:
    """Before the server imports its model."""
    import sgl_kernel.mamba
    from sglang.kernels.ops.attention.fla import layernorm_gated
    from sglang.kernels.ops.elementwise import elementwise

    layernorm_gated.RMSNorm.forward = head_norm
    elementwise.fused_gate_sigmoid_mul_add = add_gated_expert

    sgl_kernel.mamba.causal_conv1d_fn_cpu = convolution
    sgl_kernel.mamba.causal_conv1d_update_cpu = convolution_of_one
    sgl_kernel.mamba.chunk_gated_delta_rule_cpu = delta_rule
    for name, function in {
        "fused_gdn_gating_cpu": gates,
        "fused_sigmoid_gating_delta_rule_update_cpu": delta_rule_of_one,
        "fused_qk_gemma_rmsnorm_cpu": norms,
        "fused_qk_gemma_rmsnorm_with_gate_cpu": norms_with_gate,
        "fused_qkvzba_split_reshape_cat_contiguous_cpu": split_projections,
        "fused_sigmoid_mul_cpu": gated,
    }.items():
        setattr(torch.ops.sgl_kernel, name, function)


def add_gated_expert(x_TH: Tensor, weight_H: Tensor, shared_TH: Tensor, sum_TH: Tensor) -> None:
    """Add the output of the shared expert, times its gate, to that of the others; H here is the
    hidden width.
    """
    sum_TH += torch.sigmoid(x_TH @ weight_H)[:, None] * shared_TH


def convolution(
    x_DT: Tensor,
    weight_DW: Tensor,
    bias: Tensor | None,
    *,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **unused: Any,
) -> Tensor:
    """y [D, T]; the last W - 1 positions of every sequence go to its place in `conv_states`."""
    found, bounds = torch.empty_like(x_DT), query_start_loc.tolist()
    kept = weight_DW.shape[1] - 1
    for number, (start, end) in enumerate(itertools.pairwise(bounds)):
        place = int(cache_indices[number])
        before = conv_states[place][:, -kept:]
        if not bool(has_initial_state[number]):
            before = torch.zeros_like(before)
        both = torch.cat([before.to(x_DT.dtype), x_DT[:, start:end]], 1)
        found[:, start:end] = silu(_windows(both, weight_DW))
        conv_states[place][:, -kept:] = both[:, -kept:]
    return found


def convolution_of_one(
    x_BD: Tensor,
    conv_states: Tensor,
    weight_DW: Tensor,
    bias: Tensor | None,
    activation: Any,
    *,
    conv_state_indices: Tensor,
) -> Tensor:
    """y [B, D] of one new token of every sequence."""
    places, kept = conv_state_indices.long(), weight_DW.shape[1] - 1
    before_BDW = conv_states[places][..., -kept:].to(x_BD.dtype)
    both_BDW = torch.cat([before_BDW, x_BD[..., None]], -1)
    conv_states[places] = both_BDW[..., -kept:].to(conv_states.dtype)
    return silu((both_BDW * weight_DW).sum(-1))


def _windows(x: Tensor, weight_DW: Tensor) -> Tensor:
    return (x.unfold(1, weight_DW.shape[1], 1) * weight_DW[:, None]).sum(-1)


def gates(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """g and beta, [1, T, N]."""
    decay = -A_log.float().exp() * softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def delta_rule(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    **unused: Any,
) -> tuple[Tensor, None, None]:
    """o [1, T, N, V]; each sequence starts from its state in `initial_state`, and leaves its last
    one there.
    """
    bounds, found = cu_seqlens.tolist(), torch.empty_like(v)
    for number, (start, end) in enumerate(itertools.pairwise(bounds)):
        state_NVK = initial_state[int(initial_state_indices[number])]
        for token in range(start, end):
            one = (x[0, token] for x in (q, k, v, g, beta))
            found[0, token] = _step(state_NVK, *one)
    return found, None, None


def delta_rule_of_one(
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    **unused: Any,
) -> Tensor:
    """The same for one new token of every sequence."""
    g, beta = gates(A_log, a.reshape(-1, len(A_log)), b.reshape(-1, len(A_log)), dt_bias)
    ends = torch.arange(q.shape[1] + 1)
    states = {"initial_state": initial_state_source, "initial_state_indices": initial_state_indices}
    return delta_rule(q=q, k=k, v=v, g=g, beta=beta, cu_seqlens=ends, **states)[0]


def _step(
    state_NVK: Tensor, q_HK: Tensor, k_HK: Tensor, v_NV: Tensor, g_N: Tensor, beta_N: Tensor
) -> Tensor:
    """o [N, V] of one token; the state is changed in place."""
    ratio = len(v_NV) // len(q_HK)
    q_NK, k_NK = (_unit(x).repeat_interleave(ratio, 0) for x in (q_HK, k_HK))
    state = state_NVK.float() * g_N.exp()[:, None, None]
    wrong_NV = v_NV.float() - (state @ k_NK[..., None])[..., 0]
    state = state + beta_N[:, None, None] * wrong_NV[..., None] * k_NK[:, None]
    state_NVK.copy_(state)
    return (state @ q_NK[..., None])[..., 0] * q_NK.shape[-1] ** -0.5


def _unit(x: Tensor) -> Tensor:
    return x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6)


def norms(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Queries and keys, normalised per head with weights that are centred at zero."""
    return tuple(
        rms_norm(x.reshape(-1, head_dim).float(), (head_dim,), 1 + w.float(), eps).to(x.dtype)
        for x, w in ((q, q_weight), (k, k_weight))
    )


def norms_with_gate(
    q_gate: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    head_dim: int,
    heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, and the gates, of which each follows its head's queries."""
    q, gate = q_gate.unflatten(-1, (heads, 2 * head_dim)).chunk(2, -1)
    return *norms(q, k, q_weight, k_weight, eps, head_dim), gate.contiguous().view(-1, head_dim)


def head_norm(module: Any, x: Tensor, z: Tensor) -> Tensor:
    """Stands in `forward`: x normalised, and silu(z) of it."""
    return rms_norm(x, x.shape[-1:], module.weight, module.eps) * silu(z.float()).to(x.dtype)


def split_projections(
    qkvz: Tensor, ba: Tensor, key_heads: int, value_heads: int, key_width: int, value_width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k and v as one, z [T, N, V], b and a [T, N]."""
    keys, values = key_heads * key_width, value_heads * value_width
    qkv, z = qkvz.split([2 * keys + values, values], -1)
    b, a = ba.chunk(2, -1)
    z = z.unflatten(-1, (value_heads, value_width))
    return qkv.contiguous(), z.contiguous(), b.contiguous(), a.contiguous()


def gated(x: Tensor, gate: Tensor) -> None:
    """x sigmoid(gate), in place."""
    x.copy_(x * gate.view_as(x).float().sigmoid())
