"""Parity of trainer and engine during a run: before its first step, and when they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from megatron_stare.config import Config, EngineError, MismatchAlarm
from megatron_stare.data.prompts import PromptStream
from megatron_stare.loop.parity.parity import Reader, beyond, cause, compare, limit, sample
from megatron_stare.loop.parity.scoring import by_sequence
from megatron_stare.loop.prepare import PreparedStep
from megatron_stare.numerics.exchange import all_gather_bytes
from megatron_stare.policy.actor import Actor
from megatron_stare.records import EVERY_RANK, Group, Rollout, TokenBatch
from megatron_stare.reporting.logprob_table import Column, Parity, text
from megatron_stare.rollout.engine import Engine
from megatron_stare.rollout.tools.engine import ToolEngine
from megatron_stare.system import BestEffort

TOKENS = 64  # of a response before training
WORST = 4  # rollouts of a table


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
        self.engine = engine.engine if isinstance(engine, ToolEngine) else engine
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


def _apart(batch: TokenBatch, group: torch.distributed.ProcessGroup | None) -> Tensor:
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
        torch.distributed.all_reduce(total, group=group)
    return (total[0] / total[1].clamp(min=1)).cpu()
