"""A relay over HTTP: who may ask, and what it answers."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch

from megatron_stare.config import UserError
from megatron_stare.rollout.sglang.process import free_port
from megatron_stare.sync.delta.encoding import KeptWeights, Table, packed
from megatron_stare.sync.delta.transport import RelayFault, RelayLink
from tests.sync.delta.world import full_disk, serving, url_of


def test_only_requests_with_the_key_are_answered(tmp_path: Path) -> None:
    with serving(tmp_path / "relay", key="secret") as server:
        for headers in ({}, {"authorization": "Bearer secrets"}, {"authorization": "secret"}):
            for method, path in (("GET", "/state"), ("POST", "/update")):
                answer = httpx.request(method, url_of(server) + path, headers=headers)
                assert answer.status_code == 401 and "secret" not in answer.text
        with pytest.raises(UserError, match=r"has another key; set sglang.api_key or"):
            RelayLink(url_of(server), "", 5.0).look()
        link = RelayLink(url_of(server), "secret", 5.0)
        link.look()
        assert (link.held, link.path) == ("", str(tmp_path / "relay" / "weights"))


def test_unknown_requests_are_refused(tmp_path: Path) -> None:
    with serving(tmp_path / "relay") as server, httpx.Client(base_url=url_of(server)) as client:
        assert client.get("/weights").status_code == 404
        assert client.post("/update", content=b"no message").status_code == 409
        assert client.post("/update", content=iter([b"piece"])).status_code == 411
        assert client.get("/state").json()["held"] == ""
        with pytest.raises(UserError, match=f"--port {server.port}: .* give another one"):
            serving(tmp_path / "other", server.port).__enter__()


def test_a_missing_relay_and_another_server_are_faults(tmp_path: Path) -> None:
    with pytest.raises(RelayFault, match="ClientConnectorError"):
        RelayLink(f"http://127.0.0.1:{free_port()}", "", 5.0).look()
    with serving(tmp_path / "relay") as server, pytest.raises(RelayFault, match="no GET"):
        RelayLink(url_of(server) + "/v1", "", 5.0).look()


def test_a_full_disk_of_the_relay_is_named(tmp_path: Path) -> None:
    kept = KeptWeights()
    kept.replace([("a", torch.zeros(1 << 18))], encoding=False)
    part = kept.whole(["a"])
    content = packed(Table("run-0", "", 0, True, part.entries), part.blocks)
    with serving(tmp_path / "relay") as server:
        link = RelayLink(url_of(server), "", 60.0)
        link.start("full")
        with full_disk():
            link.send(content)
            with pytest.raises(UserError, match=r"cannot write weights: .* make room in its"):
                link.wait()
        link.send(content)
        link.wait()
        assert link.held == "run-0"
