"""E4M3 numbers in blocks of 128 x 128 that share a scale: what FP8 checkpoints hold of a matrix.

    s_b = 2^ceil(log2(max |W_b| / 448)),  code = round_E4M3(W / s_b),  W' = code s_b

W has whole numbers of blocks, or ragged ones at its ends. Servers multiply by the scale, so that it
is what checkpoints call `weight_scale_inv`. It may be any number there; a power of two makes W'
exact in bf16 (4 significant bits), and encoding W' again gives W' to the last bit, whatever was
written in between. It costs nothing but range: a block's largest code lies in [224, 448].

Shape legend: O outputs, I inputs, B = 128, b blocks of an axis.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
SCALE = "_scale_inv"  # follows the name of a matrix in that of its scales
LARGEST = 448.0  # of E4M3
_LEAST_EXPONENT = -100  # below it s times the least E4M3 number would leave bf16's range


def encode(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [O, I] in E4M3 and scales [ceil(O / B), ceil(I / B)] in fp32. A block of zeros, or of
    numbers below 2^-110, has the least scale.
    """
    blocks_bBbB = _blocks(weight_OI.float())
    largest_bb = blocks_bBbB.abs().amax(dim=(1, 3))
    mantissa_bb, exponent_bb = torch.frexp(largest_bb / LARGEST)  # mantissa in [0.5, 1)
    exponent_bb = exponent_bb - (mantissa_bb == 0.5).int()
    scale_bb = torch.ldexp(torch.ones_like(largest_bb), exponent_bb.clamp(min=_LEAST_EXPONENT))
    code_bBbB = (blocks_bBbB / scale_bb[:, None, :, None]).to(torch.float8_e4m3fn)
    return _whole(code_bBbB, weight_OI.shape).contiguous(), scale_bb


def decode(code_OI: Tensor, scale_bb: Tensor) -> Tensor:
    """W' [O, I] in fp32, for scales of any size."""
    value_bBbB = _blocks(code_OI.float()) * scale_bb[:, None, :, None]
    return _whole(value_bBbB, code_OI.shape)


def rounded(weight_OI: Tensor) -> Tensor:
    """W' in the dtype of W, which is bf16 or fp32."""
    return decode(*encode(weight_OI)).to(weight_OI.dtype)


def _blocks(weight_OI: Tensor) -> Tensor:
    rows, columns = (-size % BLOCK for size in weight_OI.shape)
    padded = torch.nn.functional.pad(weight_OI, (0, columns, 0, rows))
    return padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))


def _whole(blocks_bBbB: Tensor, shape: torch.Size) -> Tensor:
    return blocks_bBbB.flatten(2, 3).flatten(0, 1)[: shape[0], : shape[1]]
