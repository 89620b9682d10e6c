"""Handles to a GPU's memory, as ranks hand them to servers."""

from __future__ import annotations

import base64
import pickletools

import pytest
import torch

from megatron_stare.loop.sync.parts import handed_out
from megatron_stare.policy.topology import Topology

pytestmark = pytest.mark.nullcuda


def test_a_handle_names_its_own_gpu_and_has_no_weights_in_it(topology: Topology) -> None:
    """One for each of a server's ranks: torch counts who has opened one."""
    weights = [(f"w{n}", torch.full((1 << 14,), float(n), device="cuda")) for n in range(3)]
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    parts = handed_out(iter(weights), 2 << 16, [[0, 0], [0]], topology)
    for number, part in enumerate(parts):
        names = [name for name, _ in part.bucket]
        assert names == [["w0", "w1"], ["w2"]][number] and part.last == (number == 1)
        contents = [content for of_server in part.contents for content in of_server]
        assert len(contents) == 3 and len(set(contents)) == 3
        for content in contents:
            raw = base64.b64decode(content)
            assert len(raw) < 4096
            said = [argument for _, argument, _ in pickletools.genops(raw)]
            assert uuid in said
            assert "torch.multiprocessing.reductions rebuild_cuda_tensor" in said
            assert set(names) <= {*filter(lambda one: isinstance(one, str), said)}
