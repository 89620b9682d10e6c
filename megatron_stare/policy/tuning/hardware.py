"""What this process can compute with."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Hardware:
    """A GPU and the libraries that are there for it; on a CPU everything is absent.

    `transformer_engine` is its version, empty where there is none. `weight_gradients`: NVIDIA's
    apex, built with its CUDA extensions, is recognised by the one that Megatron uses; the package
    of that name on PyPI is another project and has none.
    """

    cuda: bool = False
    transformer_engine: tuple[int, ...] = ()
    weight_gradients: bool = False
    flash_attention_3: bool = False
    capability: tuple[int, int] = (0, 0)
    memory_bytes: int = 0

    @property
    def has_transformer_engine(self) -> bool:
        return bool(self.transformer_engine)


@functools.cache
def hardware() -> Hardware:
    """Of this process, looked at once."""
    if not torch.cuda.is_available():
        return Hardware()
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.utils import get_te_version

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Hardware(
        cuda=True,
        transformer_engine=tuple(get_te_version().release) if HAVE_TE else (),
        weight_gradients=importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
        flash_attention_3=importlib.util.find_spec("flash_attn_3") is not None,
        capability=(properties.major, properties.minor),
        memory_bytes=properties.total_memory,
    )
