"""Shared parts of these tests: models, pools on running servers, requests,
and log-probs to compare with.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from megatron_stare.config import Config, SGLangConfig, override
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Rollout
from megatron_stare.rollout.engine import Request, SamplingParams, stop_ids
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.rollout.sglang.process import ServerProcess, server_command
from megatron_stare.rollout.sglang.server import Model, read_config
from megatron_stare.sync.served_engine import ServedEngine, make_sync
from tests.conftest import SGLANG_PYTHON
from tests.rollout.sglang.idle import send_weights
from tests.tiny_models import byte_tokenizer, save_tokenizer, tiny_config, write_checkpoint

VOCABULARY, CONTEXT = 257, 512
PLAIN = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=24)
LONG = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=450)
TOLERANCE = 1e-4


def _is_newer() -> bool:
    """Whether the servers' SGLang computes checksums of its weights and streams what is new alone:
    0.5.9 does neither.
    """
    ask = "from importlib.metadata import version; print(version('sglang'))"
    answer = (
        subprocess.run([SGLANG_PYTHON, "-c", ask], capture_output=True, text=True)
        if SGLANG_PYTHON.exists()
        else None
    )
    return answer is None or answer.stdout.strip() != "0.5.9"


NEWER = CHECKSUMS = _is_newer()
STREAM_INTERVAL = 8 if NEWER else 0
VERIFY = f"sglang.verify_weights={str(CHECKSUMS).lower()}"


def make_model(directory: Path, family: str, seed: int = 0, **changes: Any) -> Path:
    """A checkpoint of 2.2 MB with a byte tokenizer."""
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 180,
        "num_hidden_layers": 4,
    }
    write_checkpoint(directory, tiny_config(family, **(shape | changes)), seed)
    weights = load_file(directory / "model.safetensors")
    for name in (
        "model.embed_tokens.weight",
        "lm_head.weight",
    ):  # else its logits, hundreds wide, are mere rounding
        if name in weights:
            weights[name] = 0.2 * weights[name]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(directory)
    return directory


def start_server(checkpoint: Path, log: Path, port: int = 0, *further: str) -> ServerProcess:
    """A server that may give its memory back. Not waited for."""
    arguments = ["--dtype", "float32", "--enable-memory-saver", *further]
    arguments += ["--incremental-streaming-output"] if NEWER else []
    return ServerProcess(
        server_command(SGLangConfig()), str(checkpoint), arguments, log, "127.0.0.1", port
    )


def wait_for(
    servers: Sequence[ServerProcess],
    checkpoint: Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Until all of them answer; UserError where one ended instead. Without a tokenizer the
    checkpoint is one of `make_model`.
    """
    urls = [server.url for server in servers]
    pool = SGLangPool(SGLangConfig(urls=urls), served(checkpoint, tokenizer), checkpoint)
    with contextlib.closing(pool):
        for attached, process in zip(pool.servers, servers, strict=True):
            attached.process = process  # so that its early end is noticed
        pool.start().result()
        for attached in pool.servers:
            attached.process = None


def served(checkpoint: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> Model:
    """The weights of a server of this checkpoint."""
    tokenizer = tokenizer or byte_tokenizer()
    stops = stop_ids(str(checkpoint), tokenizer)
    return Model(str(checkpoint), "float32", tokenizer, stops, read_config(str(checkpoint)))


@contextlib.contextmanager
def attached(
    urls: Sequence[str],
    checkpoint: Path,
    directory: Path,
    *,
    keeps_cache: bool = False,
    **settings: Any,
) -> Iterator[SGLangPool]:
    """A pool on running servers, with the checkpoint's weights as version 0."""
    quick: dict[str, Any] = {"sync_method": "tensor", "sync_timeout": 60.0, "health_interval": 1.0}
    quick |= {"verify_weights": CHECKSUMS, "stream_interval": STREAM_INTERVAL}
    config = SGLangConfig(urls=list(urls), **(quick | settings))
    model = served(checkpoint)
    with contextlib.closing(SGLangPool(config, model, directory, keeps_cache=keeps_cache)) as pool:
        pool.start().result(timeout=300)
        sync(pool, checkpoint, 0, directory)
        yield pool


def sync(pool: SGLangPool, checkpoint: Path, version: int, directory: Path) -> None:
    """Send a checkpoint's weights to every server of the pool."""
    pool.expect(version)
    sender = make_sync(pool, pool.settings, str(checkpoint), directory / "weights")
    send_weights(sender, load_file(checkpoint / "model.safetensors").items(), pool.servers)


def requests(count: int, seed: int = 3) -> list[Request]:
    """Prompts of many lengths, a seed of its own for each."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Request(
            tuple(torch.randint(1, VOCABULARY, (1 + 3 * n % 17,), generator=generator).tolist()),
            (seed, n),
        )
        for n in range(count)
    ]


def assert_sampled_from(
    checkpoint: Path,
    asked: Sequence[Request],
    rollouts: Sequence[Rollout],
    temperature: float = 1.0,
) -> None:
    """Every rollout's log-probs are those that transformers computes of
    its ids after its own request's prompt.
    """
    assert len(rollouts) == len(asked)
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for request, rollout in zip(asked, rollouts, strict=True):
        ids = torch.tensor([[*request.prompt_ids, *rollout.response_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1] / temperature
        expected = torch.log_softmax(logits, -1).gather(
            -1, torch.tensor(rollout.response_ids)[:, None]
        )[:, 0]
        torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, atol=TOLERANCE, rtol=0)


def engine_for(
    checkpoint: Path, directory: Path, topology: Topology, *settings: str
) -> ServedEngine:
    """A pool as the engine of a run in this process."""
    paths = (f"policy.hf_checkpoint={checkpoint}", f"run.dir={directory}", "rollout.engine=sglang")
    quick = ("sglang.health_interval=0.5", "sglang.sync_timeout=60")
    quick += (f"sglang.stream_interval={STREAM_INTERVAL}",)
    return ServedEngine(
        override(Config(), [*paths, *quick, VERIFY, *settings]), byte_tokenizer(), topology
    )
