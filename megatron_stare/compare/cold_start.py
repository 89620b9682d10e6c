"""Supervised training before RL, by the same Megatron actor: demonstrations in, a Hugging Face
checkpoint out.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from megatron_stare.config import (
    Config,
    LossConfig,
    NonFiniteError,
    OptimizerConfig,
    UserError,
)
from megatron_stare.data.conversations import tokenize_conversation
from megatron_stare.data.rows import BadRow
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.parts import load_tokenizer
from megatron_stare.losses import find_objective
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.conversion.convert import export_hf
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Group, Prompt, Rollout
from megatron_stare.reporting.bars import progress
from megatron_stare.reporting.heartbeat import phase


def cold_start(config: Config, topology: Topology, interrupt: Interrupt, target: Path) -> bool:
    """Train on cold_start.data from policy.hf_checkpoint and write the result to `target`.
    A target that exists is complete: nothing is done.

    Cross-entropy on the assistant's tokens (data/conversations.py) or the response's, token-mean,
    AdamW with cosine decay to min_lr_ratio. False: a signal ended it early, and the next run starts
    it from the beginning.
    """
    settings = config.cold_start
    if target.is_dir():
        return True
    demonstrations = _read_demonstrations(config)
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
    dist.barrier()
    return True


def _supervised(config: Config) -> Config:
    """The config of the supervised phase: its own optimizer, temperature 1."""
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
    return dataclasses.replace(config, optimizer=optimizer, rollout=rollout)


def _epochs(rows: int, draws: int, seed: int) -> numpy.ndarray:
    """Row numbers of `draws` draws: every row once per epoch, each epoch in an order of its own."""
    generator = numpy.random.default_rng((seed, 2))
    return numpy.concatenate([generator.permutation(rows) for _ in range(-(-draws // rows))])[
        :draws
    ]


def _read_demonstrations(config: Config) -> list[Group]:
    """One group of one rollout per row of cold_start.data;
    UserError for a row that is neither of the two forms.
    """
    path, tokenizer = Path(config.cold_start.data), load_tokenizer(config.policy.hf_checkpoint)
    if not path.is_file():
        raise UserError(
            f"cold_start.data={path} does not exist; give a .jsonl of prompt and response, or of "
            "messages"
        )
    rows: list[dict[str, Any]] = []
    conversations: dict[int, tuple[Any, Any]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        try:
            rows.append(row := _row(json.loads(line)))
            if "messages" in row:
                tools = row.get("tools") or ()
                conversations[number] = tokenize_conversation(row["messages"], tokenizer, tools)
        except json.JSONDecodeError:
            raise UserError(f"{path}, row {number + 1}: is no JSON; correct it") from None
        except BadRow as error:
            raise UserError(f"{path}, row {number + 1}: {error}; correct it") from None
    if len(rows) < config.cold_start.batch_size:
        raise UserError(f"{path}: {len(rows)} rows are fewer than cold_start.batch_size; lower it")
    tokenized = conversations | _tokenized(rows, tokenizer)
    return [_demonstration(number, *tokenized[number]) for number in range(len(rows))]


def _row(row: Any) -> dict[str, Any]:
    """{"messages": [...], "tools": [...]} or {"prompt": text, "response": text}, else BadRow."""
    if isinstance(row, dict) and isinstance(row.get("messages"), list):
        return row
    if not isinstance(row, dict) or not all(
        isinstance(row.get(name), str) for name in ("prompt", "response")
    ):
        raise BadRow("needs text fields prompt and response, or a list messages")
    return {"prompt": row["prompt"], "response": row["response"]}


def _tokenized(
    rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase
) -> dict[int, tuple[Any, Any]]:
    """Ids and loss mask of every row of prompt and response, by its number. One call: each
    costs more than tokenizing a short text.
    """
    numbers = [number for number, row in enumerate(rows) if "prompt" in row]
    if not numbers:
        return {}
    texts = [rows[number][name] for name in ("prompt", "response") for number in numbers]
    encoded = tokenizer(texts, return_attention_mask=False)["input_ids"]
    halves = zip(encoded[: len(numbers)], encoded[len(numbers) :], strict=True)
    return {
        number: (prompt + response, [0] * len(prompt) + [1] * len(response))
        for number, (prompt, response) in zip(numbers, halves, strict=True)
    }


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
