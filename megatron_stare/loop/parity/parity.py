"""One set of tokens, scored by everybody: the server that sampled them, every server reading them
again, the trainer as it scores a batch, and the trainer one response at a time.

    decode          the server's log-probs while it sampled, at the sampling temperature
    prefill         each server's log-probs of the same ids, read at once; SGLang gives them at
                    temperature 1, whatever the temperature is that it samples at
    trainer         packed as a training step packs them
    trainer alone   each response in a pass of its own

decode - prefill is the server's own doing, trainer - trainer alone the trainer's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy

from megatron_stare.collect.rollout_worker import training_params
from megatron_stare.collect.rounds import all_gather_groups
from megatron_stare.config import Config
from megatron_stare.loop.parity import scoring
from megatron_stare.policy.model import PolicyModel
from megatron_stare.policy.topology import Topology, agreed
from megatron_stare.records import Group, Prompt, Rollout
from megatron_stare.reporting.logprob_table import Column, LogprobDifference, Parity, difference
from megatron_stare.rollout.engine import Engine, Request, generate

if TYPE_CHECKING:  # it takes packages that only servers need
    from megatron_stare.rollout.sglang.answers import Prefill

# The word of a seed that sets these samples apart from those that are trained.
_SEED = 0x9A217
# nats, where neither mismatch.alarm nor alarms.mismatch is set.
DEFAULT_LIMIT = 0.1
_COLD = "trainer at temperature 1"


@runtime_checkable
class Reader(Protocol):
    """An engine whose servers can read ids without sampling any."""

    def prefill(self, sequences: Sequence[numpy.ndarray]) -> Mapping[str, Sequence[Prefill]]:
        """Each server's log-probs of the sequences, by its name; on rank 0."""
        ...

    def wrong_weights(self) -> str:
        """The first tensor that a server holds other than it was sent, in words; empty: none.
        Collective.
        """
        ...


@dataclass(frozen=True)
class Sampled:
    """The sampled rollouts, one in each group. On rank 0 also these whole, and each server's answer
    for them.
    """

    groups: Sequence[Group]
    rollouts: Sequence[Rollout]
    prefills: Mapping[str, Sequence[Prefill]]

    def ids(self, number: int) -> numpy.ndarray:
        """Prompt and response of one group; on rank 0."""
        prompt, rollout = self.groups[number].prompt, self.rollouts[number]
        return numpy.concatenate([prompt.token_ids, rollout.response_ids])


def sample(
    config: Config, engine: Engine, prompts: Sequence[Prompt], tokens: int, topology: Topology
) -> Sampled:
    """One response of up to `tokens` to each prompt, as training samples, without tools; and the
    servers' answers when they read it. Collective.
    """
    params = dataclasses.replace(training_params(config), max_new_tokens=tokens)
    requests = [
        Request(prompt.token_ids, (config.run.seed, _SEED, prompt.index, 0)) for prompt in prompts
    ]
    found = generate(engine, requests if topology.is_first else [], params)
    rollouts = [dataclasses.replace(each, reward=0.0, advantage=0.0) for each in found]
    mine = [Group(*pair) for pair in zip(prompts, [(each,) for each in rollouts], strict=False)]
    sampled = Sampled(all_gather_groups(mine, topology)[0], rollouts, {})
    prefills: dict[str, Sequence[Prefill]] = {}

    def read() -> None:
        if topology.is_first and isinstance(engine, Reader):
            prefills.update(
                engine.prefill([sampled.ids(number) for number in range(len(rollouts))])
            )

    agreed(topology, read)
    return dataclasses.replace(sampled, prefills=prefills)


def compare(
    model: PolicyModel, sampled: Sampled, version: int, *, thorough: bool = True
) -> Parity | None:
    """Every pair of columns on rank 0, None on the others. Not `thorough`: without the passes of
    single responses. Collective.
    """
    groups, at = sampled.groups, model.temperature
    columns: dict[str, Column] = {"trainer": scoring.packed(model, groups, version, at)}
    if at != 1:
        columns[_COLD] = scoring.packed(model, groups, version, 1.0)
    choices: list[numpy.ndarray] = []
    if thorough:
        columns["trainer alone"] = scoring.alone(model, groups, version, at)
        choices = scoring.likeliest(model, groups, version)
    if not model.topology.is_first:
        return None
    columns["decode"] = [rollout.logprobs for rollout in sampled.rollouts]
    servers = {
        f"prefill {number}" if len(sampled.prefills) > 1 else "prefill": answers
        for number, answers in enumerate(sampled.prefills.values())
    }
    lengths = [rollout.length for rollout in sampled.rollouts]
    disagree = {}
    for name, answers in servers.items():
        columns[name] = [one.logprobs[-n:] for one, n in zip(answers, lengths, strict=True)]
        if choices:
            theirs = [one.likeliest[-n:] for one, n in zip(answers, lengths, strict=True)]
            other = numpy.concatenate(theirs) != numpy.concatenate(choices)
            disagree[name] = float(other.mean())
    pairs = [("decode", "trainer")]
    pairs += [("decode", name) for name in servers if at == 1]
    pairs += [(name, "trainer" if at == 1 else _COLD) for name in servers]
    pairs += [("trainer", "trainer alone")] if thorough else []
    return Parity(columns, [each.response_ids for each in sampled.rollouts], pairs, disagree)


def limit(config: Config) -> float:
    """The mean difference [nats] up to which trainer and server agree."""
    return config.mismatch.alarm or config.alarms.mismatch or DEFAULT_LIMIT


def beyond(parity: Parity, most: float) -> list[LogprobDifference]:
    """The pairs whose mean is above it, or no number."""
    return [each for each in parity.differences if not each.mean <= most]


def cause(parity: Parity, most: float, wrong_weights: str, operation: str) -> str:
    """The likely causes of a difference that is above `most`, cheapest to look at first.
    `operation`: the first of the trainer's that transformers computes otherwise, or nothing.
    """
    far = {each.pair for each in beyond(parity, most)}
    reading = [pair for pair in far if pair.startswith("prefill")]
    if wrong_weights:
        return f"weights: {wrong_weights}; look at how they are sent (sglang.sync_method)"
    cold = _COLD in parity.columns and difference(
        "decode", parity.columns["decode"], parity.columns[_COLD]
    )
    if cold and cold.mean <= most and not reading:
        return (
            "temperature: the log-probs of sampled tokens are those of temperature 1; start the "
            "server without SGLANG_RETURN_ORIGINAL_LOGPROB and without sampling defaults"
        )
    if operation:
        return f"the trainer: {operation} is another in transformers; look at the conversion"
    if "trainer - trainer alone" in far:
        return "the trainer: a response has other log-probs packed with others than alone"
    if not reading:
        return (
            "decoding: the server reads the tokens as the trainer does, and sampled with other "
            "log-probs; look for overridden sampling parameters, quantised caches, and try another "
            "--attention-backend"
        )
    return (
        "kernels: the weights are the same, and the server computes otherwise; compare dtype and "
        "quantisation, and try another --attention-backend"
    )
