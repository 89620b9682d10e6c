"""The trainer's side: deltas where they are due, everything where they are not, through faults."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_stare.config import Config, SGLangConfig, UserError, override
from megatron_stare.planning.plan import make_plan
from megatron_stare.recipes import CLUSTERS, find_recipe
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.rollout.sglang.process import free_port
from megatron_stare.rollout.sglang.server import Model
from megatron_stare.rollout.sglang.weights import WeightMismatch
from megatron_stare.sync.delta import transport
from megatron_stare.sync.delta.transport import Rates, RelayTransport
from megatron_stare.sync.served_engine import make_sync
from tests.rollout.sglang.fake_server import fake_servers
from tests.rollout.sglang.idle import send_weights, tiny_model
from tests.rollout.sglang.proxy import Proxy
from tests.sync.delta.world import same, serving, stepped, url_of, weights_in

SLOW = Rates(wire=1.0, ratio=0.01)  # deltas pay


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def urls(model: Model) -> Iterator[list[str]]:
    """Two servers that take any weights."""
    with fake_servers(2, model_path=model.hf_checkpoint, vocab_size=71) as found:
        yield found


class World:
    """A run's weights, its pool on two servers, and what sends them."""

    def __init__(self, pool: SGLangPool, directory: Path) -> None:
        self.pool = pool
        checkpoint = pool.model.hf_checkpoint
        self.sync = make_sync(pool, pool.settings, checkpoint, directory)
        self.relays: RelayTransport = self.sync.transport  # type: ignore[assignment]
        generator = torch.Generator().manual_seed(0)
        shapes = {"embed": (600, 1000), "layer.weight": (200, 512), "layer.norm": (512,)}
        self.weights = {
            name: torch.randn(shape, generator=generator).bfloat16()
            for name, shape in shapes.items()
        }

    def step(self, share: float = 0.02) -> dict[str, float]:
        """New weights, sent to all servers; what is measured."""
        self.pool.expect(self.pool.version + 1)
        if self.pool.version:
            self.weights = stepped(self.weights, self.pool.version, share)
        return self.send()

    def send(self) -> dict[str, float]:
        for link in self.relays.links:
            link.rates = replace(SLOW)
        send_weights(self.sync, self.weights.items(), self.pool.servers)
        assert {server.weights for server in self.pool.servers} == {self.pool.tag}
        return self.sync.metrics()

    def holds(self, directory: Path) -> bool:
        return same(weights_in(directory), self.weights)


@contextlib.contextmanager
def world(
    model: Model, urls: list[str], relays: list[str], directory: Path, **settings: Any
) -> Iterator[World]:
    config = SGLangConfig(
        **{
            "urls": list(urls),
            "relays": relays,
            "sync_method": "delta",
            "sync_bucket_mib": 1,
            "sync_timeout": 20.0,
            "verify_weights": False,
            "health_interval": 60.0,
        }
        | settings
    )
    with contextlib.closing(SGLangPool(config, model, directory / "logs")) as pool:
        pool.start().result(timeout=60)
        yield World(pool, directory)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "relay"


def test_deltas_between_full_syncs(model: Model, urls: list[str], place: Path) -> None:
    """Bit for bit at every step; what changed is counted; every fourth sync is full."""
    with (
        serving(place) as server,
        world(model, urls, [url_of(server)], place, full_sync_interval=4) as run,
    ):
        for number in range(9):
            before, found = run.weights, run.step()
            assert run.holds(place)
            full = number % 4 == 0
            assert found["sync_delta"] == (0.0 if full else 1.0)
            whole = sum(tensor.nbytes for tensor in run.weights.values())
            assert found["sync_bytes_full"] == whole
            assert (found["sync_bytes"] > whole) if full else (found["sync_bytes"] < 0.1 * whole)
            changed = sum(int((run.weights[name] != before[name]).sum()) for name in before)
            elements = sum(tensor.numel() for tensor in before.values())
            assert found.get("changed_fraction") == (changed / elements if number else None)
        assert found["sync_delta_fallbacks"] == 0
        assert run.pool.servers[0].client.url != run.pool.servers[1].client.url


def test_a_late_server_costs_nothing(model: Model, urls: list[str], place: Path) -> None:
    """The same version once more, for it: its relay has it."""
    with serving(place) as server, world(model, urls, [url_of(server)], place) as run:
        run.step()
        once, again = run.step(), run.send()
        for row in (once, again):
            for key in [key for key in row if key.startswith("sync_seconds")]:
                del row[key]
        assert again == once and once["changed_fraction"] > 0


def test_the_measured_rates_decide(model: Model, urls: list[str], place: Path) -> None:
    """The sync after a full one tries deltas, whatever was measured; later ones follow."""
    with serving(place) as server, world(model, urls, [url_of(server)], place) as run:
        for _ in range(2):
            run.step()
        run.relays.links[0].rates = Rates(wire=1e-9, ratio=0.01, encode=1e-8)
        run.pool.expect(2)
        send_weights(run.sync, run.weights.items(), run.pool.servers)
        assert run.sync.metrics()["sync_delta"] == 0.0 and run.holds(place)
        rates = run.relays.links[0].rates
        assert rates.wire > 0 and rates.whole > 0 and rates.compare > 0 and rates.encode == 1e-8


@pytest.mark.parametrize("fault", ["restarted", "corrupted", "header", "distrusted", "broken off"])
def test_faults_fall_back_to_a_full_sync(
    fault: str, model: Model, urls: list[str], place: Path
) -> None:
    """Each is counted once, and the next sync is a delta again."""
    with contextlib.ExitStack() as stack:
        port = free_port()
        server = stack.enter_context(serving(place, port))
        run = stack.enter_context(world(model, urls, [url_of(server)], place))
        for _ in range(3):
            run.step()
        if fault == "restarted":
            stack.enter_context(restarted(server, place, port))
        elif fault == "corrupted":
            file = place / "weights" / "model-00000.safetensors"
            content = bytearray(file.read_bytes())
            content[-7] ^= 1
            file.write_bytes(content)
        elif fault == "header":
            file = place / "weights" / "model-00000.safetensors"
            file.write_bytes(file.read_bytes().replace(b'"embed"', b'"emb_d"'))
        elif fault == "distrusted":
            run.relays.abandon(WeightMismatch("a server holds something else"))
        else:
            break_off(run)
        found = run.step()
        assert run.holds(place) and found["sync_delta_fallbacks"] == 1
        assert found["sync_delta"] == 0 and found["changed_fraction"] > 0
        found = run.step()
        assert run.holds(place) and found["sync_delta_fallbacks"] == 1
        assert found["sync_delta"] == 1


def test_a_relay_whose_weights_a_server_cannot_load_is_sent_everything(
    model: Model, urls: list[str], place: Path
) -> None:
    proxy = Proxy(int(urls[0].rpartition(":")[2]))
    with (
        contextlib.closing(proxy),
        serving(place) as server,
        world(model, [proxy.url], [url_of(server)], place) as run,
    ):
        for _ in range(2):
            run.step()
        proxy.faults["/update_weights_from_disk"] = [400]
        with pytest.raises(RuntimeError):
            run.step()
        again = run.send()
        assert again["sync_delta_fallbacks"] == 1
        assert run.holds(place) and run.step()["sync_delta"] == 1


@contextlib.contextmanager
def restarted(server: Any, place: Path, port: int) -> Iterator[None]:
    """The same address and directory, with a restarted relay."""
    server.shutdown()
    server.server_close()
    server.server_close = server.shutdown = lambda: None
    with serving(place, port):
        yield


def break_off(run: World) -> None:
    """A stream that ends in the middle: the relay has a part, the kept weights are of two."""

    def half() -> Iterator[tuple[str, Tensor]]:
        for number, (name, tensor) in enumerate(stepped(run.weights, 99).items()):
            if number == 2:
                raise RuntimeError("a rank has died")
            yield name, tensor

    run.pool.expect(run.pool.version + 1)
    with pytest.raises(RuntimeError, match="a rank has died"):
        send_weights(run.sync, half(), run.pool.servers)


def test_the_sync_waits_for_an_absent_relay(
    model: Model, urls: list[str], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is back when it is asked for the third time; the others do without it meanwhile."""
    ports = [free_port(), free_port()]
    places = [place / "one", place / "two"]
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(serving(where, port))
            for where, port in zip(places, ports, strict=True)
        ]
        relays = [url_of(server) for server in servers]
        run = stack.enter_context(world(model, urls, relays, place))
        run.step()
        servers[1].shutdown()
        servers[1].server_close()
        servers[1].server_close = servers[1].shutdown = lambda: None
        pauses: list[float] = []

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 2:
                stack.enter_context(serving(places[1], ports[1]))

        monkeypatch.setattr(transport.time, "sleep", pause)
        found = run.step()
        assert len(pauses) == 2 and all(map(run.holds, places))
        assert found["sync_delta"] == 0.5 and found["sync_delta_fallbacks"] == 1


def test_a_relay_that_stays_absent_ends_the_run(
    model: Model, urls: list[str], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(place) as server, world(model, urls, [url_of(server)], place) as run:
        run.step()
        monkeypatch.setattr(transport, "_PAUSE_SECONDS", 0.0)
        run.relays.settings = replace(run.relays.settings, sync_timeout=0.05)
        server.shutdown()
        server.server_close()
        server.server_close = server.shutdown = lambda: None
        with pytest.raises(UserError, match=r"cannot be given the weights: .* start it again"):
            run.step()


@pytest.mark.parametrize("fault", ["absent", "three for two"])
def test_impossible_relays_are_refused(
    fault: str, model: Model, urls: list[str], place: Path
) -> None:
    absent = f"http://127.0.0.1:{free_port()}"
    relays, message = {
        "absent": ([absent], r"where no relay answers .* python -m megatron_stare relay"),
        "three for two": ([absent] * 3, r"has 3 addresses for 2 servers; give one for all"),
    }[fault]
    ended = pytest.raises(UserError, match=message)
    with ended, world(model, urls, relays, place):
        pass


def test_deltas_without_a_relay_are_refused_and_planned_for() -> None:
    with pytest.raises(UserError, match=r"sync_method=delta needs sglang.relays; start one"):
        override(Config(), ["sglang.sync_method=delta"])
    with pytest.raises(UserError, match=r"sglang.relays has 'site', which is not an address"):
        override(Config(), ["sglang.sync_method=delta", "sglang.relays=[site]"])
    config, cluster = find_recipe("short_cot_7b"), CLUSTERS["short_cot_7b"]
    delta = ("sglang.sync_method=delta", "sglang.relays=[http://site:31000]")
    before, after = (
        make_plan(override(config, list(settings)), cluster).host_bytes for settings in ((), delta)
    )
    assert 13e9 < after - before < 16e9, "two bytes for each of 7.6e9 parameters"
