"""`parity SOURCE`: compares the log-probs of engine and trainer on one batch, before training."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_stare.config import Config, EngineError, UserError
from megatron_stare.data.mixture import training_stream
from megatron_stare.loop.assemble import embedded_engine, policy_engine
from megatron_stare.loop.parity import Reader, Sampled, beyond, cause, compare, limit, sample
from megatron_stare.loop.resolve import load_tokenizer, offered_tools
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.build import DTYPES
from megatron_stare.policy.conversion.verification import (
    TOLERANCES,
    OperationDifference,
    compare_operations,
    compared,
    first_beyond,
    first_unequal,
    last_hidden,
)
from megatron_stare.policy.model import PolicyModel
from megatron_stare.policy.topology import Topology
from megatron_stare.reporting.logprob_table import Parity, text
from megatron_stare.rollout.embedded import EmbeddedEngine
from megatron_stare.rollout.engine import Engine

NAME = "parity.json"
_HIDDEN_STATES = "--enable-return-hidden-states"


def run(config: Config, prompts: int, tokens: int) -> int:
    """`parity` with process groups of its own. tokens 0: at most 256 for each response."""
    if prompts < 1:
        raise UserError(f"--prompts {prompts} must be 1 or more")
    tokens = tokens or min(256, config.rollout.rollout_max_response_len)
    with topologies.session(config.policy, config.run.seed) as topology:
        return parity(config, topology, prompts, tokens)


def parity(config: Config, topology: Topology, prompts: int, tokens: int) -> int:
    """Print the tables and write them to run.dir. The exit code is 0 if the differences are within
    the limit; otherwise it is 1, and the likely cause is printed. UserError: nothing can be
    compared. The call is collective.
    """
    config = _prepared(config, tokens)
    tokenizer = load_tokenizer(config.policy.hf_checkpoint)
    stream, _ = training_stream(config, tokenizer, offered_tools(config))
    chosen = [stream.at(number) for number in range(prompts)]
    with contextlib.ExitStack() as ending:
        try:
            engine, model = ending.enter_context(policy_engine(config, tokenizer, topology))
            step = engine.version
            sampled = sample(config, engine, chosen, tokens, topology)
        except EngineError as error:
            if topology.is_first:
                print(f"the engine failed: {error}")
            return 1
        lines, fault = _inside(config, model, sampled, engine, tokenizer)
        model.steer()
        found = compare(model, sampled, step)
        most = limit(config)
        far = topology.gather(found is not None and bool(beyond(found, most)))[0]
        wrong = engine.wrong_weights() if far and isinstance(engine, Reader) else ""
    if found is not None:
        found = dataclasses.replace(found, operations=lines)
        reason = cause(found, most, wrong, fault) if far else ""
        print(text(found, tokenizer.decode))
        _write(Path(config.run.dir), found, step, most, reason)
        print(f"beyond {most:g} nats: {reason}" if far else f"within {most:g} nats")
    return int(far)


def _prepared(config: Config, tokens: int) -> Config:
    """The configuration without tools and agents, in which launched servers return hidden
    states.
    """
    room = config.rollout.rollout_max_response_len
    if not 0 < tokens <= room:
        raise UserError(
            f"--tokens {tokens} must lie in [1, rollout.rollout_max_response_len={room}]"
        )
    served = config.sglang
    if not served.urls and _HIDDEN_STATES not in served.server_args:
        arguments = f"{served.server_args} {_HIDDEN_STATES}".strip()
        served = dataclasses.replace(served, server_args=arguments)
    tools = dataclasses.replace(config.tools, environment="")
    agents = dataclasses.replace(config.agents, function="", command=[])
    return dataclasses.replace(config, sglang=served, tools=tools, agents=agents)


def _inside(
    config: Config, model: PolicyModel, sampled: Sampled, engine: Engine, tokenizer: Any
) -> tuple[list[str], str]:
    """Compare every operation on the first response with transformers' model, and the last hidden
    states with those that servers return: the lines to print, and the first operation whose
    difference rounding does not explain. This needs a rank that has the whole model.
    """
    if model.topology.world_size > 1:
        return ["operations are compared on one rank alone; start this without torchrun"], ""
    ids = sampled.ids(0).tolist()
    chunk, tolerance = model.chunks[0], TOLERANCES[DTYPES[config.policy.dtype]]
    with contextlib.ExitStack() as ending:
        if not isinstance(engine, EmbeddedEngine):
            reference = embedded_engine(config, tokenizer)
            ending.callback(reference.close)
            reference.load_weights(model.weights(), 0)
        else:
            reference = engine
        every = compare_operations(chunk, reference.model, model.hf, ids)
    lines = ["", "trainer against transformers, one response:"]
    lines += [_line(each) for each in every if each.name.endswith("output") or ":" not in each.name]
    unequal, far = first_unequal(every), first_beyond(every, tolerance)
    lines.append(
        f"first operation that is not bitwise equal: {unequal.name}"
        if unequal
        else "every operation is bitwise equal"
    )
    lines += [
        _hidden(chunk, model, name, answers[0], ids) for name, answers in sampled.prefills.items()
    ]
    return lines, far.name if far else ""


def _hidden(chunk: Any, model: PolicyModel, server: str, prefill: Any, ids: Sequence[int]) -> str:
    if prefill.hidden is None:
        return f"{server} was started without {_HIDDEN_STATES}: no hidden states to compare"
    states = torch.from_numpy(prefill.hidden)
    found = compared("trainer", last_hidden(chunk, model.hf, ids), states)
    return f"final norm, against {server}:\n{_line(found)}"


def _line(each: OperationDifference) -> str:
    size = f"{each.difference:.2g} of {each.scale:.2g}"
    return f"  {each.name:<36} max |difference| {size:<18} bitwise equal {each.equal:.1%}"


def _write(directory: Path, found: Parity, step: int, most: float, reason: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    content = {
        "step": step,
        "limit": most,
        "cause": reason,
        "pairs": [dataclasses.asdict(each) for each in found.differences],
        "likeliest_differ": dict(found.disagree),
        "operations": list(found.operations),
    }
    (directory / NAME).write_text(json.dumps(content, indent=2) + "\n")
