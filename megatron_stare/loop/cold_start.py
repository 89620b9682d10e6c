"""Supervised warm-up through the same Megatron actor: demonstrations in, a Hugging Face checkpoint out."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy
import torch.distributed as dist

from megatron_stare.config import Config, LossConfig, OptimizerConfig, UserError
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.parts import load_tokenizer
from megatron_stare.losses import find_objective
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.export import export_hf
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Group, Prompt, Rollout
from megatron_stare.reporting.logbook import progress


def cold_start(config: Config, topology: Topology, interrupt: Interrupt, target: Path) -> bool:
    """Train on cold_start.data from policy.hf_checkpoint and write the result to `target`; done already: nothing.

    Cross-entropy on response tokens, token-mean, AdamW with cosine decay to min_lr_ratio. False where a signal ended
    it early; it then starts anew the next time.
    """
    settings = config.cold_start
    if target.is_dir():
        return True
    demonstrations = _read_demonstrations(config)
    actor = Actor(_supervised(config), topology, settings.steps)
    objective, loss_config = find_objective("sft"), LossConfig(name="sft")
    loss = objective.bind(loss_config)
    order = _epochs(len(demonstrations), settings.steps * settings.batch_size, config.run.seed)
    with progress("cold start", settings.steps, enabled=topology.is_first) as bar:
        for chosen in order.reshape(settings.steps, settings.batch_size):
            if interrupt.asked():
                return False
            batch = actor.pack([demonstrations[number] for number in chosen], 0)
            signals = objective.plan(batch, loss_config, topology.across, {})
            bar.advance(loss=actor.update(batch, loss, signals)[0]["loss"])
    export_hf(actor, target)
    dist.barrier()
    return True


def _supervised(config: Config) -> Config:
    """The config of the supervised phase: its own optimizer, temperature 1."""
    settings = config.cold_start
    optimizer = OptimizerConfig(
        lr=settings.lr,
        min_lr=settings.lr * settings.min_lr_ratio,
        lr_decay_style="cosine",
        weight_decay=settings.weight_decay,
        adam_beta2=0.98,
        clip_grad=1.0,
    )
    rollout = dataclasses.replace(config.rollout, rollout_temperature=1.0)
    return dataclasses.replace(config, optimizer=optimizer, rollout=rollout)


def _epochs(rows: int, draws: int, seed: int) -> numpy.ndarray:
    """Row numbers of `draws` draws: every row once per epoch, each epoch in an order of its own."""
    generator = numpy.random.default_rng((seed, 2))
    return numpy.concatenate([generator.permutation(rows) for _ in range(-(-draws // rows))])[:draws]


def _read_demonstrations(config: Config) -> list[Group]:
    """One group of one rollout per row {"prompt", "response"}; UserError for a row that has no such text."""
    path, tokenizer = Path(config.cold_start.data), load_tokenizer(config.policy.hf_checkpoint)
    if not path.is_file():
        raise UserError(f"cold_start.data={path} does not exist; give a .jsonl of prompt and response")
    prompts, responses = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            prompts.append(row["prompt"])
            responses.append(row["response"])
        except (json.JSONDecodeError, KeyError, TypeError):
            raise UserError(f"{path}, row {number}: needs text fields prompt and response; correct it") from None
    if len(prompts) < config.cold_start.batch_size:
        raise UserError(f"{path}: {len(prompts)} rows are fewer than cold_start.batch_size; lower it")
    pairs = zip(tokenizer(prompts)["input_ids"], tokenizer(responses)["input_ids"], strict=True)
    return [_demonstration(index, tuple(prompt), tuple(response)) for index, (prompt, response) in enumerate(pairs)]


def _demonstration(index: int, prompt: tuple[int, ...], response: tuple[int, ...]) -> Group:
    shown = Rollout(
        response_ids=response,
        logprobs=(0.0,) * len(response),
        loss_mask=(1,) * len(response),
        status="completed",
        weight_version=0,
        advantage=0.0,
    )
    return Group(Prompt(index, prompt, label=""), (shown,))
