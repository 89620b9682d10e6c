"""A server that speaks SGLang's protocol and computes nothing, with its weights on the device: they
come over NCCL, in the group that a trainer opens for it.
"""

from __future__ import annotations

import asyncio
import datetime
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.rollout.sglang.fake_server import Fake, main

LIMIT = datetime.timedelta(seconds=60)


@dataclass
class Receiving(Fake):
    """`kept`: the file with the weights of the last update."""

    kept: str = ""
    groups: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def answer(self, path: str, content: dict[str, Any]) -> Any:
        if path == "/init_weights_update_group":
            self.groups[content["group_name"]] = joined(content)
        if path == "/update_weights_from_distributed":
            self.receive(content)
        found = super().answer(path, content)
        return found | {"device": "cuda"} if path == "/server_info" else found

    def receive(self, content: dict[str, Any]) -> None:
        """One bucket: the bytes of all tensors, one after the other."""
        dtypes = [getattr(torch, name) for name in content["dtypes"]]
        sizes = [
            dtype.itemsize * torch.Size(shape).numel()
            for dtype, shape in zip(dtypes, content["shapes"], strict=True)
        ]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device="cuda")
        self.groups[content["group_name"]].broadcast([flat]).wait()
        parts = zip(
            content["names"], dtypes, content["shapes"], flat.cpu().split(sizes), strict=True
        )
        for name, dtype, shape, part in parts:
            self.weights[name] = part.clone().view(dtype).view(shape)
        if content["weight_version"]:
            partial = Path(f"{self.kept}.partial")
            save_file(self.weights, partial)
            partial.rename(self.kept)


def joined(content: dict[str, Any]) -> dist.ProcessGroupNCCL:
    """The group as SGLang joins it: through torch's own prefixes in the trainer's store."""
    assert content["backend"] == "nccl"
    size = content["world_size"]
    store: Any = dist.TCPStore(
        content["master_address"], content["master_port"], size, is_master=False, timeout=LIMIT
    )
    for prefix in (content["group_name"], f"{content['group_name']}/", "cuda/"):
        store = dist.PrefixStore(prefix, store)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = LIMIT
    return dist.ProcessGroupNCCL(store, content["rank_offset"], size, options)


if __name__ == "__main__":
    asyncio.run(main(Receiving))
