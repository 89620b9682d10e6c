"""The servers of a run: launched here, given by URL, or the workers of a router."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path

import orjson
import torch

from megatron_stare.config import SGLangConfig, UserError
from megatron_stare.config.rollout import MEMORY_SHARE, SHARE_VARIABLE
from megatron_stare.http_client import FAULTS, request
from megatron_stare.rollout.sglang.access import api_key
from megatron_stare.rollout.sglang.client import QUICK_SECONDS
from megatron_stare.rollout.sglang.process import ServerProcess, server_command
from megatron_stare.rollout.sglang.server import GREEDY_ON_CPU, Model, Server, adapter_arguments


def servers_of(settings: SGLangConfig, model: Model, logs: Path) -> list[Server]:
    """The servers that the settings name, none of them started."""
    key, urls = api_key(settings), settings.urls
    if not urls and settings.router_url:
        urls = worker_urls(settings.router_url, key)
    if urls:
        return [Server(url, model, settings, url) for url in urls]
    return [
        Server(f"sglang_{number}", model, settings, launcher(settings, model, logs, number))
        for number in range(settings.num_servers)
    ]


def worker_urls(router_url: str, key: str = "") -> list[str]:
    """The sorted addresses of the router's workers. UserError: the router does not answer, or has
    no worker.
    """
    try:
        url = f"{router_url.rstrip('/')}/workers"
        status, content = request("GET", url, key, timeout=QUICK_SECONDS)
        if status != 200:
            raise ConnectionError(f"status {status}")
        urls = sorted(str(worker["url"]) for worker in orjson.loads(content)["workers"])
    except FAULTS as error:
        raise UserError(
            f"sglang.router_url={router_url} does not answer GET /workers ({error}); start the "
            "router, or correct it"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"sglang.router_url={router_url} lists no workers; give them in sglang.urls"
        ) from None
    if not urls:
        raise UserError(
            f"sglang.router_url={router_url} has no worker; start it with --worker-urls, or wait "
            "for its workers"
        )
    return urls


def placement(settings: SGLangConfig, number: int) -> list[str]:
    """The arguments that give launched server `number` GPUs of its own."""
    size, first = settings.gpus_per_server, settings.first_gpu
    if first is None:
        first = 0 if settings.colocated else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    first += number * size
    split = ["--tp-size", str(size)] if size > 1 else []
    return split + (["--base-gpu-id", str(first)] if first and torch.cuda.is_available() else [])


def arguments_of(settings: SGLangConfig, model: Model, number: int) -> list[str]:
    """The arguments of launched server `number`, without those of sglang.server_args."""
    arguments = ["--dtype", model.dtype]
    if settings.colocated:
        arguments += ["--enable-memory-saver"]
        share = os.environ.get(SHARE_VARIABLE)
        given = MEMORY_SHARE in settings.server_args
        arguments += [MEMORY_SHARE, share] if share and not given else []
    arguments += ["--load-format", "dummy"] if model.encoded else []  # the first sync brings them
    arguments += placement(settings, number)
    if settings.stream_interval:
        interval = str(settings.stream_interval)
        arguments += ["--incremental-streaming-output", "--stream-interval", interval]
    arguments += ["--enable-return-routed-experts"] if model.routed_experts else []
    arguments += ["--enable-fp32-lm-head"] if model.fp32_logits else []
    arguments += ["--enable-deterministic-inference"] if settings.deterministic else []
    arguments += adapter_arguments(model.adapters) if model.adapters else []
    arguments += _speculation(settings)
    if "vision_config" in model.config:  # a rollout shows it no images
        arguments += ["--json-model-override-args", '{"language_model_only": true}']
    if model.config.get("n_shared_experts"):  # else a GPU fuses them with the routed experts
        arguments += ["--disable-shared-experts-fusion"]
    return arguments


def _speculation(settings: SGLangConfig) -> list[str]:
    """A chain of drafts (breadth 1). SGLang counts the last sampled token as one of them, and would
    lower the limit of running requests to 48. UserError: a server on a CPU.
    """
    if settings.speculation == "none":
        return []
    if not torch.cuda.is_available():
        raise UserError(f"sglang.speculation={settings.speculation} {GREEDY_ON_CPU}")
    return [
        *("--speculative-algorithm", "NGRAM"),
        *("--speculative-num-draft-tokens", str(settings.draft_tokens + 1)),
        *("--speculative-ngram-min-bfs-breadth", "1"),
        *("--speculative-ngram-max-bfs-breadth", "1"),
        *("--max-running-requests", str(settings.max_concurrency)),
    ]


def launcher(
    settings: SGLangConfig, model: Model, logs: Path, number: int
) -> Callable[[], ServerProcess]:
    """A function that starts launched server `number`, with its log in `logs`."""
    command, key = server_command(settings), api_key(settings)
    arguments = arguments_of(settings, model, number) + shlex.split(settings.server_args)
    if key and "--config" in arguments:
        raise UserError(
            "sglang.server_args has --config, and the API key is passed by --config, which a "
            "server takes once; write the file's options into sglang.server_args"
        )
    log_file = logs / f"sglang_{number}.log"
    port = settings.port and settings.port + number

    def launch() -> ServerProcess:
        directory, host = model.directory, settings.host
        return ServerProcess(command, directory, arguments, log_file, host, port, key)

    return launch
