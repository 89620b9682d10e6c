"""One server: launched with its arguments or attached to, checked before it gets requests, probed.

    STARTING -> READY <-> PAUSED -> DEAD -> STARTING -> ...

A launched server is dead when its process has ended, or when it stays silent; then its process
group is killed and a new one started. An attached server is dead while it is silent.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from megatron_stare.config import EngineError, SGLangConfig, UserError
from megatron_stare.config.rollout import MEMORY_SHARE, SHARE_VARIABLE
from megatron_stare.rollout.engine import Limits, State
from megatron_stare.rollout.sglang.access import KEY_VARIABLE, api_key
from megatron_stare.rollout.sglang.client import ServerFault, ServerInfo, SGLangClient
from megatron_stare.rollout.sglang.process import ServerProcess, server_command
from megatron_stare.rollout.sglang.weights import ServerLayout

log = logging.getLogger(__name__)

STEADY_SECONDS = 300.0  # after this time up, a crash no longer counts as a failed start
MOST_STARTS = 10  # a start whose log keeps growing may take this many sglang.start_timeout
MOST_SECONDS = 60.0  # between two starts of one server
_POLL_SECONDS = 0.25
PROBES = 3  # unanswered probes in a row until a server counts as dead
# The fields of config.json that decide the weights' shapes and meaning.
_ARCHITECTURE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_experts",
    "num_local_experts",  # as transformers 5 writes it
    "num_experts_per_tok",
    "norm_topk_prob",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
)
_GREEDY_ON_CPU = (
    "needs servers on GPUs: elsewhere SGLang verifies drafts greedily at any temperature; set "
    "sglang.speculation=none"
)
_PROBE = (
    "Solve 12 + 345 = x.\n\tThen:  (a_1)^2 / {b}, \\frac{6}{7}! Gr\u00f6\u00dfe \u65e5\u672c "
    "\U0001f642 <think> 98"
)


@dataclass(frozen=True)
class Model:
    """The model that every server of a pool must hold: the policy's checkpoint, with its tokenizer
    and stop tokens.
    """

    hf_checkpoint: str
    dtype: str  # float32 | bfloat16
    tokenizer: PreTrainedTokenizerBase
    stop_ids: frozenset[int]
    config: dict[str, Any]  # config.json, as servers are to have it
    routed_experts: bool = False  # servers must return the experts of each token
    fp32_logits: bool = False  # servers must not round their logits
    encoded: frozenset[str] = frozenset()  # weights that servers hold in blocks of E4M3
    start: str = ""  # the directory that servers start from, if it is not hf_checkpoint
    # PEFT's adapter_config.json, where servers get the base once and then the adapters alone
    adapters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def directory(self) -> str:
        """The directory that servers start from; with FP8 weights it has none of them."""
        return self.start or self.hf_checkpoint


class Server:
    """A server as the pool sees it. `weights` is the tag of its weights, "" if they are not the
    trainer's; `version` is their number. `has_base`: it holds the weights under the adapters.
    """

    def __init__(
        self,
        name: str,
        model: Model,
        settings: SGLangConfig,
        launch: Callable[[], ServerProcess] | str,
    ):
        self.name, self.model, self.settings, self._launch = name, model, settings, launch
        self.state = State.STARTING
        self.weights, self.version, self.has_base = "", -1, False
        self.in_flight = 0
        self.starts = 0
        self.deaths = 0  # in a row, each after less than STEADY_SECONDS
        self.ready_at = 0.0  # time.monotonic() of its last admission
        self.info: ServerInfo | None = None
        self.limits = Limits(0, 0, 0)  # until it is admitted
        self.process: ServerProcess | None = None
        self._key = api_key(settings)
        self.client = SGLangClient(
            launch if isinstance(launch, str) else "http://starting", self._key
        )
        self.silent = 0
        self.updating = False  # loading weights: it may be silent meanwhile
        self.released: frozenset[str] = frozenset()  # the tags of the memory that it has released
        self.asking = asyncio.Lock()
        self.probes = 0  # that have ended

    async def start(self) -> None:
        """Launch or attach, wait until it answers, and check that it is the right one.

        UserError: it is not, or it cannot start. EngineError: it did not answer in
        sglang.start_timeout, or wrote nothing to its log for as long.
        """
        self.state, self.silent = State.STARTING, 0
        self.doubt()
        self.starts += 1
        if not isinstance(self._launch, str):
            if self.process is not None:  # its end takes seconds, and other servers' answers come
                await asyncio.to_thread(self.process.stop, at_once=True)
            self.process = self._launch()
            await self.connect(self.process.url)
        await self._admit_when_ready()

    async def connect(self, url: str) -> None:
        """Send requests to this address from now on; those in flight fail."""
        old, self.client = self.client, SGLangClient(url, self._key)
        self.client.stream_interval = old.stream_interval
        await old.close()

    async def admit(self) -> None:
        """Read the server's description. UserError: it serves another model or tokenizer."""
        info = await self.client.info()
        check_model(self.client.url, info, self.model)
        if self.settings.colocated and not info.saves_memory:
            raise UserError(
                f"{self.client.url} cannot release its memory, as sglang.colocated=true needs; "
                "start it with --enable-memory-saver, or set sglang.colocated=false"
            )
        check_modes(self.client.url, info, self.model, self.settings)
        await self._check_tokenizer()
        config = self.model.config
        context = min(int(config["max_position_embeddings"]), info.context_length)
        self.limits = Limits(int(config["vocab_size"]), context, info.prompt_length)
        self.info, self.state, self.silent, self.released = info, State.READY, 0, frozenset()
        self.client.stream_interval = self.settings.stream_interval if info.streams else 0
        self.ready_at = time.monotonic()

    @property
    def layout(self) -> ServerLayout:
        """The layout of the server's weights."""
        assert self.info is not None, "a server that was never admitted has no layout"
        dtype = self.model.dtype if self.info.dtype == "auto" else self.info.dtype
        return ServerLayout(
            self.info.tensor_size, getattr(torch, dtype), self.info.device == "cuda"
        )

    async def probe(self) -> State:
        """Ask the server for its state, and note it. Does not revive it."""
        # While it is restarted, `process` may still be the old one, whose death is known.
        if (
            self.state is not State.STARTING
            and self.process is not None
            and not self.process.alive()
        ):
            self.state = State.DEAD
        if (
            self.updating
            or self.state is State.STARTING
            or (self.state is State.DEAD and self.process is not None)
        ):
            return self.state
        try:
            found = await self.client.state(self.settings.health_timeout / PROBES)
            if self.state is State.DEAD:
                # It was started again: it has the weights of its checkpoint, and is in no group.
                self.doubt()
                self.starts += 1
                await self.admit()
                log.warning("%s answers again", self.name)
        except ServerFault as fault:
            # A refused connection is an answer: no server listens there.
            self.silent = PROBES if fault.kind == "connection" else self.silent + 1
            if self.silent >= PROBES:
                self.state = State.DEAD
            return self.state
        self.silent = 0
        # If the server does not report its state, assume the last one requested.
        self.state = found or (State.PAUSED if self.state is State.PAUSED else State.READY)
        return self.state

    @property
    def adapters(self) -> str:
        """The name of the adapters that a request must ask for; "" where weights are merged."""
        return self.weights if self.model.adapters else ""

    def doubt(self) -> None:
        """Note that the server may hold any weights: all must be sent again before it gets a
        request.
        """
        self.weights, self.has_base = "", False

    async def resume(self) -> None:
        """Continue the requests in flight after a pause."""
        await self.client.resume()
        if self.state is State.PAUSED:  # a probe found it so
            self.state = State.READY

    def pause_before_start(self) -> float:
        """Seconds to wait before the next start, and count the death: none after STEADY_SECONDS up,
        then sglang.restart_backoff, doubled from death to death up to a minute.
        """
        if self.ready_at and time.monotonic() - self.ready_at > STEADY_SECONDS:
            self.deaths, self.ready_at = 0, 0.0
        self.deaths += 1
        if self.deaths == 1:
            return 0.0
        return min(self.settings.restart_backoff * 2.0 ** min(self.deaths - 2, 30), MOST_SECONDS)

    async def close(self) -> None:
        """End a launched server; leave an attached one as it is."""
        await self.client.close()
        if self.process is not None:
            await asyncio.to_thread(self.process.stop)

    async def _admit_when_ready(self) -> None:
        """Poll until the server answers and is not paused, then admit it."""
        patience = StartPatience(self.process, self.settings.start_timeout)
        resumed = False
        while True:
            if self.process is not None and not self.process.alive():
                raise UserError(
                    f"an SGLang server ended while starting: {self.process.last_words()}; see "
                    f"{self.process.log}, correct sglang.server_args or sglang.command"
                )
            try:
                state = await self.client.state(timeout=10.0)
                if self.process is None and (
                    state is None or (state is State.PAUSED and not resumed)
                ):
                    # A killed run left it paused; an old server may be paused without saying so.
                    resumed = True
                    await self.client.resume()
                if state is not State.PAUSED:
                    await self.admit()
                    return
                problem = "it stays paused although this run resumed it; another client pauses it"
            except ServerFault as fault:
                if fault.status in (401, 403):
                    raise UserError(
                        f"{self.client.url} refuses {'this' if self._key else 'requests without a'}"
                        f" key; set sglang.api_key or {KEY_VARIABLE} to the one that it was started"
                        " with"
                    ) from None
                problem = str(fault)
            if patience.ended():
                remedy = "see its log" if self.process else "start it, or correct sglang.urls"
                raise EngineError(
                    f"{self.name} is not ready after {self.settings.start_timeout:g} s "
                    f"(sglang.start_timeout): {problem}; {remedy}"
                )
            await asyncio.sleep(_POLL_SECONDS)

    async def _check_tokenizer(self) -> None:
        probe = _PROBE + "".join(self.model.tokenizer.all_special_tokens)
        theirs = await self.client.tokenize(probe)
        ours = self.model.tokenizer(probe, add_special_tokens=False)["input_ids"]
        if theirs is not None and theirs != ours:
            raise UserError(
                f"{self.client.url} has another tokenizer than {self.model.hf_checkpoint}: it "
                f"encodes the same text as {theirs[:6]}..., not {ours[:6]}...; start it with "
                "--model-path of the policy's checkpoint"
            )


class StartPatience:
    """The time that a start may take: `seconds` from the last time that a launched server's log
    grew, and MOST_STARTS times as long in all. An attached server has no log here.
    """

    def __init__(self, process: ServerProcess | None, seconds: float) -> None:
        self._process, self._seconds, self._size = process, seconds, 0
        self._begun = self._moved = time.monotonic()

    def ended(self) -> bool:
        """Whether the time is over."""
        now = time.monotonic()
        size = self._process.log.stat().st_size if self._process is not None else 0
        if size != self._size:
            self._size, self._moved = size, now
        return now - self._moved > self._seconds or now - self._begun > MOST_STARTS * self._seconds


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
    arguments += _adapter_arguments(model.adapters) if model.adapters else []
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
        raise UserError(f"sglang.speculation={settings.speculation} {_GREEDY_ON_CPU}")
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
    key = api_key(settings)
    arguments = arguments_of(settings, model, number) + shlex.split(settings.server_args)
    if key and "--config" in arguments:
        raise UserError(
            "sglang.server_args has --config, and the API key is passed by --config, which a "
            "server takes once; write the file's options into sglang.server_args"
        )
    port = settings.port and settings.port + number
    return functools.partial(
        ServerProcess,
        server_command(settings),
        model.directory,
        arguments,
        logs / f"sglang_{number}.log",
        settings.host,
        port,
        key,
    )


def _adapter_arguments(adapters: Mapping[str, Any]) -> list[str]:
    """The arguments of a server that serves these adapters. A batch has room for two versions, or
    for one and the base.
    """
    rank, targets = str(adapters["r"]), adapters["target_modules"]
    settings = ["--max-lora-rank", rank, "--max-loras-per-batch", "2"]
    return ["--enable-lora", *settings, "--lora-target-modules", *targets]


def check_model(url: str, info: ServerInfo, model: Model) -> None:
    """UserError: the server's model differs from the policy's in a field of the weights."""
    ours = model.config
    theirs = {"model_type": info.model_type}
    if (Path(info.model_path) / "config.json").is_file():  # on this machine, or on a shared disk
        theirs |= read_config(info.model_path)
    for key in _ARCHITECTURE:
        if theirs.get(key) and ours.get(key) is not None and theirs[key] != ours[key]:
            raise UserError(
                f"{url} serves {info.model_path}, whose {key} is {theirs[key]!r}, not "
                f"{ours[key]!r} as in policy.hf_checkpoint={model.hf_checkpoint}; start it with "
                "the policy's checkpoint"
            )
    if "hidden_size" in theirs:  # it was read
        check_format(url, theirs, model)


def check_format(url: str, theirs: Mapping[str, Any], model: Model) -> None:
    """UserError: the server's config.json has its weights in another format than it is sent."""
    found, wanted = (each.get("quantization_config") or {} for each in (theirs, model.config))
    if not model.encoded:
        if found.get("weight_block_size"):
            raise UserError(
                f"{url} holds FP8 weights, and sglang.weights=policy sends it others; set "
                "sglang.weights=fp8, or start it with policy.hf_checkpoint"
            )
        return
    start = f"start it with --model-path {model.directory} --load-format dummy"
    if found.get("weight_block_size") != wanted["weight_block_size"]:
        raise UserError(
            f"{url} holds no FP8 weights in blocks of {wanted['weight_block_size']}, as "
            f"sglang.weights=fp8 sends them; {start}, or set sglang.weights=policy"
        )
    plain = {str(each).removeprefix("model.") for each in found.get("modules_to_not_convert") or ()}
    for name in sorted(model.encoded):
        if name.removesuffix(".weight").removeprefix("model.") in plain:
            raise UserError(f"{url} does not hold {name} in FP8, as it is sent; {start}")


def check_modes(url: str, info: ServerInfo, model: Model, settings: SGLangConfig) -> None:
    """UserError: the server was started without an option that the run needs."""
    if model.routed_experts and not info.routed_experts:
        raise UserError(
            f"{url} does not return the experts it chose, as policy.routing_replay=rollout needs; "
            "start it with --enable-return-routed-experts (SGLang 0.5.10 or newer), or set "
            "policy.routing_replay=old_policy"
        )
    if model.fp32_logits and not info.fp32_logits:
        raise UserError(
            f"{url} rounds its logits, and policy.fp32_logits=true does not; start it with "
            "--enable-fp32-lm-head, or set policy.fp32_logits=false"
        )
    ours = model.adapters
    if ours and not (
        info.adapter_rank >= ours["r"] and info.adapter_targets.issuperset(ours["target_modules"])
    ):
        raise UserError(
            f"{url} does not serve these adapters, as adapters.merge=false needs; start it with "
            f"{' '.join(_adapter_arguments(ours))}, or set adapters.merge=true"
        )
    if settings.deterministic and not info.deterministic:
        raise UserError(
            f"{url} does not sample by seeds, as sglang.deterministic=true needs; start it with "
            "--enable-deterministic-inference, or set sglang.deterministic=false"
        )
    if (info.speculation or "none") != settings.speculation:
        raise UserError(
            f"{url} speculates by {info.speculation or 'none'}, not by sglang.speculation="
            f"{settings.speculation}; start it so, or set sglang.speculation=none or ngram"
        )
    if info.speculation and info.device != "cuda":
        raise UserError(f"{url}: sglang.speculation={settings.speculation} {_GREEDY_ON_CPU}")
    if info.accept_threshold < 1:
        raise UserError(
            f"{url} accepts drafts beyond their probability, so that it does not sample from the "
            "policy; start it without --speculative-accept-threshold-single and -acc"
        )


def read_config(directory: str) -> dict[str, Any]:
    """The config.json of an HF directory; of a vision-language model with the fields of its text
    part.
    """
    try:
        content = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{directory}/config.json cannot be read ({error}); correct it") from None
    assert isinstance(content, dict)
    if "text_config" in content:
        content |= content["text_config"] | {"model_type": content["model_type"]}
    return content
