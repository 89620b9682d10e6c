"""Supervised training before RL, by the same Megatron actor: demonstrations in, a Hugging Face
checkpoint out.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from megatron_stare.config import (
    AdaptersConfig,
    Config,
    DataConfig,
    LossConfig,
    NonFiniteError,
    OptimizerConfig,
    UserError,
    override,
)
from megatron_stare.data.prompts import Tools, chat_messages, tokenize_conversation
from megatron_stare.data.rows import BadRow, tools_of
from megatron_stare.data.sources import parts, raw_rows
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.resolve import load_tokenizer, offered_tools
from megatron_stare.losses import find_objective
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.conversion.convert import export_hf
from megatron_stare.policy.huggingface.checkpoint import with_other_parts
from megatron_stare.policy.topology import Topology, release_workspaces
from megatron_stare.records import Group, Prompt, Rollout
from megatron_stare.reporting.heartbeat import phase
from megatron_stare.reporting.live import progress
from megatron_stare.system import atomic_write, digest, return_memory

_ORIGIN = "cold_start.json"
_DIGEST = "demonstrations"  # the key of their digest in that file
RESULT = "cold_start"  # the directory of the result, in the directory of the run or comparison


def is_due(config: Config) -> bool:
    """Whether supervised steps come before RL. The config of a run that has had them names their
    result as policy.hf_checkpoint: it lies in the run's directory or next to it, or, where the run
    has been copied, says that it was made with the same settings.
    """
    start, run = Path(config.policy.hf_checkpoint).absolute(), Path(config.run.dir).absolute()
    settings, made_with = _settings(config), _made_with(start)
    had = start in (run / RESULT, run.parent / RESULT) or settings.items() <= made_with.items()
    return config.cold_start.runs and not had


def is_ahead(config: Config) -> bool:
    """Whether `started` would train first."""
    return is_due(config) and not (Path(config.run.dir) / RESULT).is_dir()


def planned(config: Config) -> Config:
    """The config of the RL that follows, as far as its start exists.
    UserError: it is the result of other settings or of other demonstrations.
    """
    target = Path(config.run.dir) / RESULT
    if not is_due(config) or not target.is_dir():
        return config
    _check_origin(target, config)
    return override(config, [f"policy.hf_checkpoint={target}"])


def started(config: Config, topology: Topology, interrupt: Interrupt) -> Config | None:
    """The config of the RL that follows the cold start, which is run if it is due and missing.
    None: a signal ended it early.
    """
    target = Path(config.run.dir) / RESULT
    if is_due(config):
        with _servers_without_memory(config, topology):
            finished = cold_start(config, topology, interrupt, target)
            return_memory()
            release_workspaces()  # for servers on the same GPU, which take it next
        if not finished:
            return None
    return planned(config)


@contextmanager
def _servers_without_memory(config: Config, topology: Topology) -> Iterator[None]:
    """Servers that run already and share the trainer's GPUs have no memory during a cold start."""
    servers = config.sglang
    running = config.rollout.engine == "sglang" and (servers.urls or servers.router_url)
    if not (running and servers.colocated and is_ahead(config)):
        yield
        return
    from megatron_stare.sync.served_engine import ServedEngine

    tokenizer = load_tokenizer(config.policy.hf_checkpoint)
    with closing(ServedEngine(config, tokenizer, topology)) as engine:
        yield
        engine.resume_memory()


def cold_start(config: Config, topology: Topology, interrupt: Interrupt, target: Path) -> bool:
    """Train on cold_start.data from policy.hf_checkpoint and write the result to `target`.
    A target that exists is complete: nothing is done.

    Cross-entropy on the assistant's tokens (data/prompts.py) or the response's, token-mean,
    AdamW with cosine decay to min_lr_ratio. False: a signal ended it early, and the next run starts
    it from the beginning.
    """
    settings = config.cold_start
    if target.is_dir():
        return True
    demonstrations = read_demonstrations(config)
    origin = _origin(config) | {_DIGEST: _digest(config)}
    with_other_parts(Path(config.policy.hf_checkpoint))  # else the result could not be written
    actor = Actor(_supervised(config), topology, settings.steps)
    objective, loss_config = find_objective("sft"), LossConfig(name="sft")
    loss = objective.bind(loss_config)
    order = _epochs(len(demonstrations), settings.steps * settings.batch_size, config.run.seed)
    with (
        phase("cold start"),
        progress("cold start", settings.steps, enabled=topology.is_first) as bar,
    ):
        for chosen in order.reshape(settings.steps, settings.batch_size):
            if interrupt.asked():
                return False
            batch = actor.pack([demonstrations[number] for number in chosen], 0)
            signals = objective.plan(batch, loss_config, topology.across, {})
            metrics, _ = actor.update(batch, loss, signals)
            if not metrics:
                raise NonFiniteError("the gradient of the cold start is not finite")
            bar.update(loss=metrics["loss"])
    export_hf(actor, Path(config.policy.hf_checkpoint), target)
    if topology.is_first:
        atomic_write(target / _ORIGIN, json.dumps(origin, indent=2) + "\n")
    dist.barrier()
    return True


def _settings(config: Config) -> dict[str, Any]:
    return {f"cold_start.{key}": value for key, value in vars(config.cold_start).items()}


def _origin(config: Config) -> dict[str, Any]:
    """The settings that decide the result, apart from the contents of the files."""
    policy, data, seed = config.policy.hf_checkpoint, config.data, config.run.seed
    rest = {"policy.hf_checkpoint": policy, "data.system_prompt": data.system_prompt}
    return _settings(config) | rest | {"data.wrap_text": data.wrap_text, "run.seed": seed}


def _made_with(directory: Path) -> dict[str, Any]:
    """`_origin` of the cold start that wrote this checkpoint; empty if it is not known."""
    file = directory / _ORIGIN
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _check_origin(target: Path, config: Config) -> None:
    """UserError where `target` is known to be made with other settings or other demonstrations.
    Demonstrations that no longer exist are not compared.
    """
    made, origin = _made_with(target), _origin(config)
    for key, old in made.items():
        if key in origin and origin[key] != old:
            raise UserError(
                f"{target} is the result of {key}={old!r}, not {origin[key]!r}; choose another "
                "run.dir"
            )
    if _DIGEST in made and _exist(config) and made[_DIGEST] != _digest(config):
        raise UserError(
            f"{target} is the result of other demonstrations than those that cold_start.data="
            f"{config.cold_start.data} holds now; restore them, or choose another run.dir"
        )


def _exist(config: Config) -> bool:
    """Whether cold_start.data still names demonstrations."""
    try:
        return bool(parts(config.cold_start.data, "cold_start.data"))
    except UserError:
        return False


def _digest(config: Config) -> str:
    """16 hex digits of the demonstrations as they are written, in order."""
    rows = raw_rows(config.cold_start.data, "cold_start.data")
    return digest("".join(digest(json.dumps(row.row, default=str), 16) for row in rows), 16)


def _supervised(config: Config) -> Config:
    """The config of the supervised phase: its own optimizer, temperature 1, all weights trained."""
    settings = config.cold_start
    optimizer = OptimizerConfig(
        lr=settings.lr,
        min_lr=settings.lr * settings.min_lr_ratio,
        lr_decay_style="cosine",
        lr_decay_iters=settings.steps,
        weight_decay=settings.weight_decay,
        adam_beta2=0.98,
        clip_grad=1.0,
    )
    rollout = dataclasses.replace(config.rollout, rollout_temperature=1.0)
    return dataclasses.replace(
        config, optimizer=optimizer, rollout=rollout, adapters=AdaptersConfig()
    )


def _epochs(rows: int, draws: int, seed: int) -> numpy.ndarray:
    """Row numbers of `draws` draws: every row once per epoch, each epoch in an order of its own."""
    generator = numpy.random.default_rng((seed, 2))
    return numpy.concatenate([generator.permutation(rows) for _ in range(-(-draws // rows))])[
        :draws
    ]


def read_demonstrations(config: Config) -> list[Group]:
    """One group of one rollout per row of cold_start.data. Prompts are rendered as those of RL:
    data.system_prompt comes first, data.wrap_text makes a conversation of a text, and one without
    tools of its own offers those of tools.environment. UserError for a row that is neither of the
    two forms.
    """
    source, tokenizer = config.cold_start.data, load_tokenizer(config.policy.hf_checkpoint)
    offered = offered_tools(config)
    found: list[Group] = []
    for raw in raw_rows(source, "cold_start.data"):
        try:
            if raw.fault:
                raise BadRow(raw.fault)
            ids, mask = _tokenized(raw.row, tokenizer, config.data, offered)
        except BadRow as error:
            raise UserError(f"{raw.file}, row {raw.number}: {error}; correct it") from None
        found.append(_demonstration(len(found), ids, mask))
    if len(found) < config.cold_start.batch_size:
        raise UserError(
            f"{source}: {len(found)} rows are fewer than cold_start.batch_size="
            f"{config.cold_start.batch_size}; lower it"
        )
    return found


def _tokenized(
    row: Any, tokenizer: PreTrainedTokenizerBase, data: DataConfig, offered: Tools
) -> tuple[Sequence[int], Sequence[int]]:
    """Ids and loss mask of {"messages": [...], "tools": [...]} or {"prompt": ..., "response": ...};
    BadRow for any other row. `offered`: the tools of a conversation without its own.
    """
    if isinstance(row, dict) and isinstance(row.get("messages"), list) and row["messages"]:
        messages, tools = chat_messages(row["messages"], data), tools_of(row, "tools") or offered
        return tokenize_conversation(messages, tokenizer, tools, data.chat_template_kwargs)
    if not isinstance(row, dict) or not all(
        isinstance(row.get(name), str) for name in ("prompt", "response")
    ):
        raise BadRow("needs text fields prompt and response, or a list messages")
    messages = chat_messages(row["prompt"], data)
    if messages:
        whole = (*messages, {"role": "assistant", "content": row["response"]})
        return tokenize_conversation(whole, tokenizer, offered, data.chat_template_kwargs)
    if data.system_prompt:
        raise BadRow("data.system_prompt needs messages but the row is text; set data.wrap_text")
    prompt, response = tokenizer([row["prompt"], row["response"]]).input_ids
    return prompt + response, [0] * len(prompt) + [1] * len(response)


def _demonstration(index: int, ids: Sequence[int], mask: Sequence[int]) -> Group:
    """A rollout after a prompt: the tokens before the first one with loss."""
    start = mask.index(1) if 1 in mask else len(mask)
    token_ids = numpy.array(ids, numpy.int32)
    shown = Rollout(
        response_ids=token_ids[start:],
        logprobs=numpy.zeros(len(ids) - start, numpy.float32),
        loss_mask=numpy.array(mask[start:], numpy.bool_),
        status="completed",
        weight_version=0,
        advantage=0.0,
    )
    return Group(Prompt(index, token_ids[:start], label=""), (shown,))
