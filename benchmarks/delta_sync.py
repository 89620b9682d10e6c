"""Weights over a slow link: what changed, next to all of them, at every step of a real training.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/delta_sync.py
    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/delta_sync.py --mbit 1000 --steps 5
    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/delta_sync.py --rounded

A bf16 model (12 M parameters unless --hidden and --layers say otherwise) trains STARE for --steps
steps with Adam and fp32 masters, once at the paper's learning rate and once at the quickstart's.
After each step its weights go through WeightSync to relays behind a proxy that lets --mbit million
bits a second through: all of them (sglang.full_sync_interval=1), then as sglang.sync_method=delta
does it by itself, the same without the limit, and all and deltas of the same weights in FP8 blocks
(sglang.weights=fp8). --rounded trains with policy.weight_quantization=fp8. Of every sync the bytes
on the link, the seconds until the servers are asked to load, and those of encoding; then all files
of the relay are compared with what was sent by SHA-256. The servers only speak SGLang's protocol:
what a real one needs to load a directory is the same in all of them. Without the first sync, which
is full everywhere.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._measuring import machine
from megatron_stare.config import Config, SGLangConfig
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy.build import read_hf_config
from megatron_stare.policy.huggingface.fp8_weights import EncodedWeights, block_matrices
from megatron_stare.policy.topology import session
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.sync.delta.encoding import digest, words_of
from megatron_stare.sync.served_engine import make_sync
from megatron_stare.sync.weight_sync import WeightSync, in_buckets
from tests.rollout.sglang.fake_server import fake_servers
from tests.rollout.sglang.world import served
from tests.small_run import small_config
from tests.sync.delta.world import serving, weights_in
from tests.tiny_models import save_tokenizer, tiny_config

RATES = {"1e-6": 1e-6, "1e-3": 1e-3}  # the paper's, the quickstart's
PIECE_BYTES = 1 << 15
# sglang.full_sync_interval, whether the link is slow, whether the weights are in FP8 blocks
WAYS = {
    "all": (1, True, False),
    "delta": (50, True, False),
    "delta, no limit": (50, False, False),
    "FP8, all": (1, True, True),
    "FP8, delta": (50, True, True),
}


class Throttle:
    """A port that passes everything on to another one, this way at most `rate` bytes a second;
    0: as quick as it comes.
    """

    def __init__(self, target: int, rate: float) -> None:
        self.target, self.rate = target, rate
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self.listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listening.accept()
                far = socket.create_connection(("127.0.0.1", self.target))
                for end in (near, far):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for one, other, rate in ((near, far, self.rate), (far, near, 0.0)):
                    threading.Thread(target=_pass_on, args=(one, other, rate), daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket, rate: float) -> None:
    free_at = 0.0
    with contextlib.suppress(OSError):
        while piece := source.recv(PIECE_BYTES):
            target.sendall(piece)
            if rate:
                free_at = max(free_at, time.perf_counter()) + len(piece) / rate
                time.sleep(max(0.0, free_at - time.perf_counter()))
        target.shutdown(socket.SHUT_WR)


class Way:
    """One way to a relay of its own, and what each sync took. `encoded`: sent in FP8 blocks."""

    def __init__(self, sync: WeightSync, place: Path, encoded: frozenset[str]) -> None:
        self.sync, self.place, self.encoded = sync, place, encoded
        self.rows: list[dict[str, float]] = []

    def load(self, weights: dict[str, Tensor], version: int) -> None:
        """Send these weights, and compare what arrived."""
        pool, size = self.sync.pool, self.sync.settings.sync_bucket_mib << 20
        pool.expect(version)
        begun = time.perf_counter()
        stream = EncodedWeights(weights.items(), self.encoded)
        self.sync.send(in_buckets(stream, size), pool.servers, stream)
        seconds = time.perf_counter() - begun
        found = {name: digest(words_of(tensor)) for name, tensor in weights_in(self.place).items()}
        equal = found == {name: digest(words_of(tensor)) for name, tensor in stream}
        self.rows.append(self.sync.metrics() | {"seconds": seconds, "equal": float(equal)})

    def findings(self) -> dict[str, float]:
        """Means and totals after the first sync."""
        rows = self.rows[1:]
        return {
            "bytes": sum(row["sync_bytes"] for row in rows),
            "seconds": sum(row["seconds"] for row in rows),
            "median_seconds": statistics.median(row["seconds"] for row in rows),
            "deltas": sum(row["sync_delta"] for row in rows),
            "equal": sum(row["equal"] for row in rows),
            "syncs": float(len(rows)),
            "encode": statistics.median(row.get("sync_seconds_encode", 0.0) for row in rows),
            "changed_fraction": statistics.mean(row["changed_fraction"] for row in rows),
        }


@contextlib.contextmanager
def ways(checkpoint: Path, directory: Path, mbit: float, bucket_mib: int) -> Iterator[list[Way]]:
    """As WAYS lists them."""
    rate, found = mbit * 1e6 / 8, []
    matrices = block_matrices(read_hf_config(str(checkpoint)))
    with contextlib.ExitStack() as stack:
        urls = stack.enter_context(fake_servers(1, model_path=str(checkpoint), vocab_size=257))
        for number, (interval, limited, in_fp8) in enumerate(WAYS.values()):
            place = directory / f"relay_{number}"
            relay = stack.enter_context(serving(place))
            link = stack.enter_context(contextlib.closing(Throttle(relay.port, rate * limited)))
            settings = SGLangConfig(
                urls=list(urls),
                relays=[link.url],
                sync_method="delta",
                full_sync_interval=interval,
                sync_bucket_mib=bucket_mib,
                verify_weights=False,  # these servers hold none
            )
            pool = SGLangPool(settings, served(checkpoint), directory)
            stack.enter_context(contextlib.closing(pool))
            pool.start().result()
            sync = make_sync(pool, settings, str(checkpoint), directory)
            found.append(Way(sync, place, matrices if in_fp8 else frozenset()))
        yield found


def trained(config: Config, found: list[Way]) -> None:
    """Train, and have every way take the weights of every step."""
    with session(config.policy) as topology:
        trainer = Trainer(config, topology)
        load = trainer.engine.load_weights

        def loaded(weights: Iterable[tuple[str, Tensor]], version: int) -> None:
            load(weights, version)
            held = {name: tensor.detach().clone() for name, tensor in weights}
            for way in found:
                way.load(held, version)

        trainer.engine.load_weights = loaded
        with Interrupt() as interrupt:
            assert trainer.run(interrupt)


def measured(options: argparse.Namespace, directory: Path, rate: float) -> list[dict[str, float]]:
    """The seconds and bytes of each way at one learning rate."""
    model = directory / "model"
    shape = {
        "vocab_size": 257,
        "hidden_size": options.hidden,
        "intermediate_size": 11 * options.hidden // 4,
        "num_hidden_layers": options.layers,
        "max_position_embeddings": 64,
        "eos_token_id": 0,
    }
    config = small_config(
        directory,
        f"optimizer.lr={rate}",
        "optimizer.lr_warmup_iters=0",
        "policy.dtype=bf16",
        f"train.num_rollout={options.steps}",
        *(("policy.weight_quantization=fp8",) if options.rounded else ()),
    )
    torch.manual_seed(0)  # of the size that weights of a model have: 0.02
    AutoModelForCausalLM.from_config(tiny_config("qwen2", **shape)).save_pretrained(model)
    save_tokenizer(model)
    with ways(model, directory, options.mbit, options.bucket_mib) as found:
        trained(config, found)
        return [way.findings() for way in found]


def shown(results: dict[str, list[dict[str, float]]], mbit: float) -> Table:
    """One row a way."""
    table = Table(title=f"{mbit:g} Mbit/s")
    names = ("learning rate", "sent", "MB", "s", "s a sync", "encode")
    names += ("deltas", "equal", "changed")
    for name in names:
        table.add_column(name, justify="left" if name in names[:2] else "right")
    for rate, rows in results.items():
        for name, row in zip(WAYS, rows, strict=True):
            table.add_row(
                *(rate, name, f"{row['bytes'] / 1e6:.2f}", f"{row['seconds']:.2f}"),
                *(f"{row['median_seconds']:.3f}", f"{row['encode']:.3f}"),
                f"{row['deltas']:.0f} of {row['syncs']:.0f}",
                *(f"{row['equal']:.0f} of {row['syncs']:.0f}", f"{row['changed_fraction']:.2%}"),
            )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--mbit", type=float, default=200.0, help="of the link, a second")
    parser.add_argument("--hidden", type=int, default=512, help="a multiple of 32")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--bucket-mib", type=int, default=8, help="sglang.sync_bucket_mib")
    parser.add_argument("--rounded", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name, rate in RATES.items():
        with tempfile.TemporaryDirectory() as folder:
            results[name] = measured(options, Path(folder), rate)
    Console(width=120).print(shown(results, options.mbit))
    if options.json:
        about: dict[str, Any] = {"machine": machine(torch.device("cpu")), "options": vars(options)}
        options.json.write_text(json.dumps(about | {"results": results}, indent=2, default=str))


if __name__ == "__main__":
    main()
