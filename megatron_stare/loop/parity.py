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

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from megatron_stare.collect.rounds import all_gather_groups
from megatron_stare.collect.sampling_settings import training_params
from megatron_stare.config import Config, EngineError, MismatchAlarm
from megatron_stare.data.prompts import PromptStream
from megatron_stare.loop.prepare import PreparedStep
from megatron_stare.numerics.exchange import all_gather_bytes
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.layout import response_position
from megatron_stare.policy.model import PolicyModel
from megatron_stare.policy.topology import Topology, agreed
from megatron_stare.records import (
    EVERY_RANK,
    Group,
    Prompt,
    Rollout,
    RolloutMeta,
    TokenBatch,
)
from megatron_stare.reporting.logprob_table import (
    Column,
    LogprobDifference,
    Parity,
    difference,
    text,
)
from megatron_stare.rollout.engine import Engine, Request, generate
from megatron_stare.rollout.episodes import EpisodeEngine
from megatron_stare.system import BestEffort

if TYPE_CHECKING:  # it takes packages that only servers need
    from megatron_stare.rollout.sglang.answers import Prefill

# The word of a seed that sets these samples apart from those that are trained.
_SEED = 0x9A217
# nats, where neither mismatch.alarm nor alarms.mismatch is set.
DEFAULT_LIMIT = 0.1
_COLD = "trainer at temperature 1"
AT_ONCE = 64  # rollouts that every rank sees whole
TOKENS = 64  # of a response before training
WORST = 4  # rollouts of a table


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
    """One response of up to `tokens` to each prompt, as training samples, without tools or agents;
    and the servers' answers when they read it. Collective.
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
    columns: dict[str, Column] = {"trainer": _packed(model, groups, version, at)}
    if at != 1:
        columns[_COLD] = _packed(model, groups, version, 1.0)
    choices: list[numpy.ndarray] = []
    if thorough:
        columns["trainer alone"] = _alone(model, groups, version, at)
        choices = _likeliest(model, groups, version)
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


def _packed(
    model: PolicyModel, groups: Sequence[Group], version: int, temperature: float
) -> list[numpy.ndarray]:
    """ln pi of every loss token of every rollout, scored as a training step scores them. On every
    rank. Collective.
    """
    with _at(model, temperature):
        batch = model.score(model.pack(groups, version))
    assert batch.surprisal_T is not None, "it was scored"
    return by_sequence(-batch.surprisal_T, batch, _lengths(groups), model.topology)


def _alone(
    model: PolicyModel, groups: Sequence[Group], version: int, temperature: float
) -> list[numpy.ndarray]:
    """The same, each group in a pass of its own. Collective."""
    return [column for group in groups for column in _packed(model, [group], version, temperature)]


def _likeliest(model: PolicyModel, groups: Sequence[Group], version: int) -> list[numpy.ndarray]:
    """The trainer's likeliest id in the place of every loss token. Collective."""
    found = []
    for group in groups:
        batch = model.pack([group], version)
        ids_T = model.likeliest(batch, 1)[0][:, 0]
        found += by_sequence(ids_T, batch, _lengths([group]), model.topology)
    return found


def by_sequence(
    value_T: Tensor, batch: TokenBatch, lengths: Sequence[int], topology: Topology
) -> list[numpy.ndarray]:
    """The values of every sequence, [length] fp64: those of its loss tokens, NaN elsewhere; nothing
    of a sequence of length 0. The same on every rank. Collective.
    """
    begin_n = numpy.cumsum([0, *lengths])
    wanted_T = torch.tensor(lengths, device=value_T.device)[batch.sequence_T] > 0
    begin_T = torch.from_numpy(begin_n).to(value_T.device)[batch.sequence_T]
    place = (begin_T + response_position(batch.token_index_T))[wanted_T]
    table = value_T.new_zeros((2, int(begin_n[-1])), dtype=torch.float64)
    table[0, place] = value_T[wanted_T].double()
    table[1, place] = 1.0
    if topology.across.group is not None:
        dist.all_reduce(table, group=topology.across.group)  # each token is on one rank alone
    values, there = table.cpu().numpy()
    values[there == 0] = numpy.nan
    return [values[a:b] for a, b in itertools.pairwise(begin_n)]


def held(
    value_T: Tensor,
    batch: TokenBatch,
    groups: Sequence[Group],
    chosen: Callable[[RolloutMeta], bool],
    topology: Topology,
) -> list[list[numpy.ndarray | None]]:
    """The values of every chosen rollout that this rank holds, by its group: [length] fp32, NaN
    where it has no loss token; None for the others. A few rollouts at a time. Collective.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    wanted = [number for number, rollout in enumerate(rollouts) if chosen(rollout)]
    found: dict[int, numpy.ndarray] = {}
    for part in itertools.batched(wanted, AT_ONCE):
        lengths = [one.length if n in part else 0 for n, one in enumerate(rollouts)]
        columns = by_sequence(value_T, batch, lengths, topology)
        mine = [number for number in part if isinstance(rollouts[number], Rollout)]
        found |= {number: columns[number].astype(numpy.float32) for number in mine}
    numbers = itertools.count()
    return [[found.get(next(numbers)) for _ in group.rollouts] for group in groups]


def _lengths(groups: Sequence[Group]) -> list[int]:
    return [rollout.length for group in groups for rollout in group.rollouts]


@contextlib.contextmanager
def _at(model: PolicyModel, temperature: float) -> Iterator[None]:
    before, model.temperature = model.temperature, temperature
    try:
        yield
    finally:
        model.temperature = before


class Witness:
    """Compares trainer and engine before the first step, and writes a table when they differ."""

    def __init__(
        self,
        config: Config,
        actor: Actor,
        engine: Engine,
        stream: PromptStream,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.config, self.actor, self.stream, self.tokenizer = config, actor, stream, tokenizer
        self.engine = engine.engine if isinstance(engine, EpisodeEngine) else engine
        self.topology = actor.topology
        self._written: int | None = None
        self._best_effort = BestEffort("the run has no parity table of this step")

    def check_start(self, step: int) -> None:
        """Before the first step of a run with mismatch.parity_before: MismatchAlarm, with the
        figures and the likely cause, where the engine's log-probs are beyond the limit. The engine
        has the weights after `step` steps. Collective.
        """
        count, most = self.config.mismatch.parity_before, limit(self.config)
        if step or not count:
            return
        prompts = [self.stream.at(number) for number in range(count)]
        tokens = min(TOKENS, self.config.rollout.rollout_max_response_len)
        sampled = sample(self.config, self.engine, prompts, tokens, self.topology)
        found = compare(self.actor, sampled, step, thorough=False)
        if not self.topology.gather(found is not None and bool(beyond(found, most)))[0]:
            return
        wrong = self.engine.wrong_weights() if isinstance(self.engine, Reader) else ""
        message = ""
        if found is not None:
            print(text(found, self.tokenizer.decode), flush=True)
            mean = max(each.mean for each in found.differences)
            message = (
                f"before training, trainer and engine differ by {mean:.3g} nats a token, above "
                f"{most:g}: {cause(found, most, wrong, '')}"
            )
        raise MismatchAlarm(self.topology.gather(message)[0])

    def look(self, prepared: PreparedStep, metrics: Mapping[str, float]) -> None:
        """`write`, if the step's metrics are beyond mismatch.alarm or alarms.mismatch."""
        bound = self.config.alarms.mismatch
        differs = bool(bound) and metrics.get("logprob_diff_mean", 0.0) > bound
        if prepared.batches and (differs or metrics.get("mismatch_alarm_masked")):
            self.write(prepared)

    def write(self, prepared: PreparedStep) -> None:
        """Write run.dir/parity_step_<step>.txt, the table of the rollouts that are furthest apart,
        at most once in alarms.window steps. The step's batches are scored. Collective.
        """
        step = prepared.number
        if self._written is not None and step - self._written < self.config.alarms.window:
            return
        self._written = step
        apart = [_apart(batch, self.topology.across.group) for batch in prepared.batches]
        place = max(range(len(apart)), key=lambda number: float(apart[number].max()))
        found = self._table(prepared.parts[place], prepared.batches[place], apart[place])
        if found is not None:
            path = Path(self.config.run.dir) / f"parity_step_{step:08d}.txt"
            content = text(found, self.tokenizer.decode) + "\n"
            self._best_effort(lambda: path.write_text(content, encoding="utf-8"))

    def _table(self, groups: Sequence[Group], batch: TokenBatch, apart_n: Tensor) -> Parity | None:
        """The table of differences, on rank 0. Servers that have given their memory back are not
        asked.
        """
        assert batch.surprisal_T is not None, "a scored batch"
        worst = apart_n.argsort(descending=True, stable=True)[:WORST].tolist()
        rollouts = [(group, rollout) for group in groups for rollout in group.rollouts]
        lengths = [r.length if n in worst else 0 for n, (_, r) in enumerate(rollouts)]
        columns: dict[str, Column] = {}
        for name, value_T in (("trainer", -batch.surprisal_T), ("decode", batch.rollout_logprob_T)):
            every = by_sequence(value_T, batch, lengths, self.topology)
            columns[name] = [every[number] for number in sorted(worst)]
        ids = self._ids([rollouts[number] for number in sorted(worst)])
        if not self.topology.is_first:
            return None
        responses = [whole[-len(one) :] for whole, one in zip(ids, columns["trainer"], strict=True)]
        pairs, notes = [("decode", "trainer")], [f"sequences of the batch: {sorted(worst)}"]
        if any(rollout.sequences for _, rollout in rollouts):
            notes.append("servers do not read episodes of agents")
        elif self.config.rollout.rollout_temperature != 1:
            notes.append("servers read at temperature 1 and were not asked")
        elif isinstance(self.engine, Reader) and not self.config.sglang.colocated:
            try:
                answers = self.engine.prefill(ids)
            except EngineError as error:  # the run continues, or ends for its own reason
                answers = {}
                notes.append(f"servers did not read them: {error}")
            for name, answer in answers.items():
                whose = f"prefill of {name}"
                both = zip(answer, responses, strict=True)
                columns[whose] = [one.logprobs[-len(own) :] for one, own in both]
                pairs += [("decode", whose), (whose, "trainer")]
        return Parity(columns, responses, pairs, operations=notes)

    def _ids(self, chosen: Sequence[tuple[Group, object]]) -> list[numpy.ndarray]:
        """Prompt and response of each, on every rank, from the rank that holds them."""
        rank, found = self.topology.rank, []
        for group, rollout in chosen:
            mine = rank == (0 if group.holder == EVERY_RANK else group.holder)
            content = b""
            if mine:
                assert isinstance(rollout, Rollout), "it is held here"
                prompt = numpy.zeros(0, numpy.int32) if rollout.lengths else group.prompt.token_ids
                whole = numpy.concatenate([prompt, rollout.response_ids])
                content = whole.astype(numpy.int32).tobytes()
            answer = b"".join(all_gather_bytes(content, self.topology.host))
            found.append(numpy.frombuffer(answer, numpy.int32))
        return found


def _apart(batch: TokenBatch, group: dist.ProcessGroup | None) -> Tensor:
    """The mean |ln pi_trainer - ln pi_engine| of every sequence's fresh tokens, 0 without any, or
    where it was sampled at another temperature, on every rank.
    """
    assert batch.surprisal_T is not None, "a scored batch"
    fresh_T = batch.fresh_T & batch.comparable_T
    size_T = torch.where(fresh_T, batch.surprisal_T + batch.rollout_logprob_T, 0.0).abs()
    total = size_T.new_zeros((2, batch.num_sequences), dtype=torch.float64)
    total[0].index_add_(0, batch.sequence_T, size_T.double())
    total[1].index_add_(0, batch.sequence_T, fresh_T.double())
    if group is not None:
        dist.all_reduce(total, group=group)
    return (total[0] / total[1].clamp(min=1)).cpu()
