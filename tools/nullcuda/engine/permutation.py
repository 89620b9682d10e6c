"""TransformerEngine's Triton kernels that deal tokens out to experts: compiled and launched, their
values from the torch forms below, for Triton's interpreter takes a tenth of a second for a token.

Shape legend: T tokens, E experts, R rows (a token for each of its experts), H widths. `row_map` has
for each token its rows, the last first, their experts, and how many there are: [T, 2 E + 1].
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tools.nullcuda import triton_values
from tools.nullcuda.memory import aliases, is_small, write
from tools.nullcuda.values import tensors_of

KERNELS = {f"_row_id_map_pass_{number}_kernel" for number in (1, 2, 3)}
KERNELS |= {"_permute_kernel", "_unpermute_kernel"}
KERNELS |= {"_make_chunk_sort_map_kernel", "_sort_chunks_by_map_kernel"}


def install(module: ModuleType) -> None:
    """Around `transformer_engine.pytorch.triton.permutation`."""
    triton_values.COMPUTED_ELSEWHERE |= KERNELS
    for name, torch_form in TORCH_FORMS.items():
        setattr(module, name, _with_torch_form(getattr(module, name), torch_form))


def _with_torch_form(launch: Any, torch_form: Any) -> Any:
    @functools.wraps(launch)
    def launched(*args: Any, **named: Any) -> Any:
        result = launch(*args, **named)
        if is_small(*tensors_of((result, args))):
            with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
                values = torch_form(*aliases(args), **named)
                for tensor, value in zip(tensors_of(result), tensors_of(values), strict=True):
                    write(tensor, value)
        return result

    return launched


def _row_map(chosen_TE: Tensor, tokens: int, experts: int) -> Tensor:
    """Rows are numbered expert by expert, in the order of the tokens."""
    chosen = chosen_TE.bool()
    number = (chosen.t().flatten().cumsum(0) - 1).view(experts, tokens).t()
    row, expert = number.masked_fill(~chosen, -1).sort(dim=1, descending=True)
    return torch.cat([row, expert, chosen.sum(1, keepdim=True)], dim=1).int()


def _routes(row_map: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The token, the place and the expert of every row."""
    row_map = row_map.long()
    known = torch.arange(experts) < row_map[:, -1:]
    token = known.nonzero()[:, 0]
    return token, row_map[:, :experts][known], row_map[:, experts : 2 * experts][known]


def _permuted(
    x_TH: Tensor, row_map: Tensor, probability_TE: Tensor | None, scale: Any, pads: Any, *sizes: int
) -> Any:
    """A token's numbers in each of its rows; zeros where its probability is zero."""
    _, experts, rows, width, _ = sizes
    if scale is not None:
        raise NotImplementedError("fp8 rows with scales of their own")
    token, place, expert = _routes(row_map, experts)
    place = place if pads is None else place + pads.long()[expert]
    out = x_TH.new_zeros(rows, width)
    out[place] = x_TH[token]
    if probability_TE is None:
        return out, None, None
    of_row = probability_TE.new_zeros(rows)
    of_row[place] = probability_TE[token, expert]
    out[place[of_row[place] == 0]] = 0
    return out, None, of_row


def _unpermuted(
    x_RH: Tensor,
    row_map: Tensor,
    merging_TE: Tensor | None,
    probability_R: Tensor | None,
    pads: Any,
    tokens: int,
    experts: int,
    width: int,
) -> Any:
    """The sum of a token's rows, weighted where there are weights; each row's probability back in
    its place.
    """
    token, place, expert = _routes(row_map, experts)
    place = place if pads is None else place + pads.long()[expert]
    part = x_RH[place].float()
    if merging_TE is not None:
        part = part * merging_TE[token, expert, None].float()
    out = torch.zeros(tokens, width).index_add_(0, token, part).to(x_RH.dtype)
    if probability_R is None:
        return out, None
    back_TE = probability_R.new_zeros(tokens, experts)
    back_TE[token, expert] = probability_R[place]
    return out, back_TE


def _chunk_map(sizes: Tensor, order: Tensor, tokens: int, count: int) -> Tensor:
    """The new place of each row when the chunks are put into that order."""
    chunks = torch.arange(tokens)[: int(sizes.sum())].split(sizes.tolist())
    place = torch.arange(tokens, dtype=torch.int32)
    source = torch.cat([chunks[number] for number in order.tolist()])
    place[source] = torch.arange(len(source), dtype=torch.int32)
    return place


def _sorted(
    x_RH: Tensor,
    row_map: Tensor,
    probability_R: Tensor | None,
    tokens: int,
    width: int,
    is_forward: bool,
) -> Any:
    """Rows where the map sends them, or back."""
    place = row_map.long().argsort() if is_forward else row_map.long()
    return x_RH[place], None if probability_R is None else probability_R[place]


TORCH_FORMS = {
    "make_row_id_map": _row_map,
    "permute_with_mask_map": _permuted,
    "unpermute_with_mask_map": _unpermuted,
    "make_chunk_sort_map": _chunk_map,
    "sort_chunks_by_map": _sorted,
}
