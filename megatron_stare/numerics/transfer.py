"""Copies from host memory to a device that do not wait for it.

A copy out of pageable memory makes the host wait until the device has caught up; one out of pinned
memory is only queued, as a kernel is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Tensor | Sequence[int], device: torch.device) -> Tensor:
    """The host tensor, or the numbers as int64, on `device`, after the work queued there so far.

    Pinned memory comes from torch's own cache, which keeps it until the copy is done.
    """
    host = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.int64)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)
