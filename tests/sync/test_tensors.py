"""Weights in memory of trainer and servers: which rank sends which part, and its release."""

from __future__ import annotations

import base64
import pickle
from typing import Any

import pytest
import torch

from megatron_stare.config import PolicyConfig, SGLangConfig, UserError
from megatron_stare.policy import topology as topologies
from megatron_stare.sync.tensors import (
    NodePlacement,
    ServerPlacement,
    TensorTransport,
    _is_here,
    givers,
    with_handles,
)
from megatron_stare.sync.weight_sync import in_buckets
from tests.distributed import run_distributed

A, B = ("a", "0"), ("b", "1")
# Two nodes of four ranks; the third server is on the second node, loopback is on both.
RANKS = [NodePlacement(A, [True, True, False])] * 4 + [NodePlacement(B, [True, False, True])] * 4
WEIGHTS = [(f"w{number}", torch.full((4,), float(number))) for number in range(5)]


def placed(first_gpu: int = 0, size: int = 1, nodes: int = 1) -> ServerPlacement:
    return ServerPlacement("http://server:1", first_gpu, size, nodes)


@pytest.mark.parametrize(
    ("number", "place", "expected"),
    [
        (0, placed(size=4), [0, 1, 2, 3]),  # loopback: rank 0's node
        (1, placed(first_gpu=2, size=2), [2, 3]),
        (2, placed(size=4), [4, 5, 6, 7]),
        (2, placed(first_gpu=3), [7]),
        (2, placed(size=8), [4, 5, 6, 7] * 2),  # more GPUs than ranks train on
    ],
)
def test_a_server_is_given_memory_of_its_own_node_and_gpu(number, place, expected):
    assert givers(place, number, RANKS) == expected


@pytest.mark.parametrize(
    ("number", "place", "words"),
    [(0, placed(), "is on no node of this run"), (1, placed(nodes=2), "spans 2 nodes")],
)
def test_a_server_that_cannot_open_handles_is_refused(number, place, words):
    ranks = [NodePlacement(A, [False, True])]
    with pytest.raises(UserError, match=words):
        givers(place, number, ranks)


def test_this_machines_addresses_are_known():
    assert _is_here("http://127.0.0.1:30000") and _is_here("http://localhost")
    assert not _is_here("http://192.0.2.1:30000"), "an unused address (RFC 5737)"
    assert not _is_here("http://no-such-host.invalid")


def hand_out(rank: int, world_size: int) -> list[Any]:
    """A rank's view of weights that are sent to two servers, by rank 0 and 1 and by rank 1."""
    topology = topologies.start(PolicyConfig())
    return [
        ([name for name, _ in part.tensors], part.last, part.contents)
        for part in with_handles(iter(WEIGHTS), 32, [[0, 1], [1]], topology)
    ]


def test_every_rank_sends_its_parts_and_they_equal_those_of_one_rank():
    plain = [(part.tensors, part.last) for part in in_buckets(iter(WEIGHTS), 32)]
    for seen in run_distributed(hand_out, 2):
        assert [names for names, _, _ in seen] == [[n for n, _ in bucket] for bucket, _ in plain]
        assert [last for _, last, _ in seen] == [False, False, True]
        for (_, _, contents), (bucket, _) in zip(seen, plain, strict=True):
            assert [len(of_server) for of_server in contents] == [2, 1]
            for content in (one for of_server in contents for one in of_server):
                read = pickle.loads(base64.b64decode(content))
                whole = torch.cat([tensor for _, tensor in bucket])
                assert torch.equal(read["flattened_tensor"].view(torch.float32), whole)
                assert [entry.name for entry in read["metadata"]] == [name for name, _ in bucket]


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_memory_that_colocated_servers_cannot_open_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool: Any = None
    monkeypatch.setenv(name, "garbage_collection_threshold:0.8,expandable_segments:True")
    TensorTransport(pool, SGLangConfig())
    with pytest.raises(UserError, match=f"{name} has expandable_segments"):
        TensorTransport(pool, SGLangConfig(colocated=True))
    monkeypatch.setenv(name, "expandable_segments:False")
    TensorTransport(pool, SGLangConfig(colocated=True))
