"""Judges finished rollouts: rewards and their parts, verdicts, and the loss mask."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from megatron_stare.config import ScoringConfig, UserError
from megatron_stare.records import Prompt, Rollout, RolloutMeta
from megatron_stare.scoring.rewards import RewardBackend, build_backends
from megatron_stare.scoring.shaping import shaped_reward, soft_overlong_penalty
from megatron_stare.scoring.signatures import EXPECTED
from megatron_stare.scoring.verdict import Sample, Verdict, unverifiable

OVERLONG = "overlong"
# Verifiers that look for an answer in the text.
EXTRACTING = ("math", "multiple_choice", "reasoning_gym")
# After this many responses without a single verdict the verifier or the labels are at fault.
MAX_WITHOUT_VERDICT = 64
MAX_KILLED = 8  # the same where each was ended by a deadline, which is a long wait
# Groups judged at the same time: enough to keep every backend busy. The backends' own settings
# bound how many samples run at a time.
_THREADS = 8


class Judge:
    """The rewards of scoring.reward and scoring.rewards. Safe to use from many threads;
    close it at the end.

    reward = sum over scoring.rewards of weight * value, plus the overlong penalty. The verdict is
    that of scoring.reward, whose value scoring.shaping may replace. If one of the verifiers has no
    value, the sample is unverifiable: reward None, advantage 0, loss mask 0.
    """

    def __init__(
        self,
        scoring: ScoringConfig,
        max_response_length: int = 0,
        others: Mapping[str, RewardBackend] | None = None,
    ) -> None:
        """`others`: rewards by name that a higher layer built.
        UserError: a name or setting that cannot work.
        """
        self.scoring = scoring
        self.max_response_length = max_response_length
        self.weights = dict(scoring.rewards) or {scoring.reward: 1.0}
        if scoring.reward not in self.weights:
            raise UserError(
                f"scoring.reward={scoring.reward!r}, which decides right or wrong, is not in "
                f"scoring.rewards ({', '.join(self.weights)}); add it there, with weight 0 if need "
                "be, or name one of those"
            )
        if scoring.overlong_buffer_len > max_response_length > 0:
            raise UserError(
                f"scoring.overlong_buffer_len={scoring.overlong_buffer_len} exceeds "
                f"rollout.rollout_max_response_len={max_response_length}; lower it"
            )
        self.backends = build_backends(self.weights, scoring, others)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="judge")
        self._without_verdict = self._killed = 0
        self._warned = False

    def judge(self, pairs: Sequence[tuple[Prompt, Rollout]]) -> list[Rollout]:
        """The rollouts, in order, with reward, verdict and parts.

        UserError: none of the first responses could be judged.
        """
        samples = [sample_of(prompt, rollout) for prompt, rollout in pairs]
        verdicts = self.verdicts(samples)
        self._check_verdicts(verdicts)
        return [
            self._judged(rollout, verdict)
            for (_, rollout), verdict in zip(pairs, verdicts, strict=True)
        ]

    def start(self, pairs: Sequence[tuple[Prompt, Rollout]]) -> Future[list[Rollout]]:
        """`judge` in another thread: a slow verifier delays neither sampling nor other groups."""
        return self._threads.submit(self.judge, pairs)

    def verdicts(self, samples: Sequence[Sample]) -> list[Verdict]:
        """The weighted verdict of each sample, without anything that needs token counts."""
        whole = [sample for sample in samples if not sample.void]
        columns = {name: self.backends[name].judge(whole) for name in self.weights}
        rows = zip(*columns.values(), strict=True)
        return [
            unverifiable(sample.void)
            if sample.void
            else self._weighed(dict(zip(columns, next(rows), strict=True)))
            for sample in samples
        ]

    def close(self) -> None:
        """End the verifiers, also in the middle of a sample."""
        for backend in self.backends.values():
            backend.close()
        self._threads.shutdown(cancel_futures=True)

    def _weighed(self, found: dict[str, Verdict]) -> Verdict:
        decisive = found[self.scoring.reward]
        kills = sum(verdict.kills for verdict in found.values())
        values = {
            name: verdict.value for name, verdict in found.items() if verdict.value is not None
        }
        for name, verdict in found.items():
            if verdict.value is None:
                missing = unverifiable(f"{name}: {verdict.reason}", decisive.extracted, kills)
                return dataclasses.replace(missing, parts=values)
        total = sum(self.weights[name] * value for name, value in values.items())
        return Verdict(
            total, decisive.verdict, decisive.extracted, values, decisive.reason, kills=kills
        )

    def _judged(self, rollout: Rollout, verdict: Verdict) -> Rollout:
        parts, reward = dict(verdict.parts), verdict.value
        if self.scoring.shaping != "none" and reward is not None:
            name, correct = self.scoring.reward, verdict.verdict == "correct"
            own = shaped_reward(self.scoring.shaping, correct, rollout)
            reward += self.weights[name] * (own - parts[name])
            parts[name] = own
        if self.scoring.overlong_buffer_len:
            parts[OVERLONG] = soft_overlong_penalty(
                len(rollout.response_ids),
                self.max_response_length,
                self.scoring.overlong_buffer_len,
                self.scoring.overlong_penalty_factor,
            )
            reward = None if reward is None else reward + parts[OVERLONG]
        judged = dataclasses.replace(
            rollout,
            reward=reward,
            verdict=verdict.verdict,
            reward_parts=parts,
            verifier_kills=verdict.kills,
            answered=verdict.extracted is not None or self.scoring.reward not in EXTRACTING,
        )
        if reward is None:
            return judged.without_loss(advantage=0.0)
        if self.scoring.overlong_filter and rollout.status == "truncated":
            return judged.without_loss()
        return judged

    def _check_verdicts(self, verdicts: Sequence[Verdict]) -> None:
        """Warn once about missing verdicts. UserError: no response has had a verdict so far."""
        missing = [verdict for verdict in verdicts if verdict.value is None]
        if missing and not self._warned:
            self._warned = True
            print(
                f"warning: {len(missing)} of {len(verdicts)} responses could not be judged; they "
                "are masked out of the loss and counted as `unverifiable` (the first: "
                f"{missing[0].reason})",
                file=sys.stderr,
                flush=True,
            )
        if self._without_verdict < 0:  # there has been a verdict
            return
        if len(missing) < len(verdicts):
            self._without_verdict = -1
            return
        self._without_verdict += len(missing)
        self._killed += sum(verdict.kills > 0 for verdict in missing)
        if self._without_verdict >= MAX_WITHOUT_VERDICT or self._killed >= MAX_KILLED:
            remedy = "check the verifier, its settings and the labels"
            if "." in self.scoring.reward:
                remedy = f"correct it, or the labels; {EXPECTED}; it returns a number"
            raise UserError(
                f"scoring.reward={self.scoring.reward!r} could judge none of the first "
                f"{self._without_verdict} responses (the first: {missing[0].reason}); {remedy}"
            )


def sample_of(prompt: Prompt, rollout: Rollout) -> Sample:
    """The rollout as a verifier's input; void if its engine or its episode failed."""
    void = "the engine could not finish the rollout" if rollout.verdict == "unverifiable" else ""
    if rollout.episode.get("errors"):
        failed = [name for name in rollout.episode if name.startswith("failed/")]
        void = f"its episode ended in an error {failed[0] if failed else ''}".strip()
    text = rollout.text
    return Sample(text, prompt.label, prompt.metadata, prompt.text, void, rollout.outcome)


def judgement_metrics(rollouts: Sequence[RolloutMeta]) -> dict[str, float]:
    """The metrics of judged rollouts.

    reward: mean over verified rollouts; accuracy: correct share of them; both absent if there are
    none. baseline_reward: mean of the baselines, if there are any. no_answer_fraction: share of
    all rollouts. reward/<name>: mean of each part. unverifiable, verifier_kills: counts.
    """
    verified = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    metrics = {"reward": sum(verified) / len(verified)} if verified else {}
    if verified:
        right = sum(rollout.verdict == "correct" for rollout in rollouts)
        metrics["accuracy"] = right / len(verified)
    baselines = [rollout.baseline for rollout in rollouts if rollout.baseline is not None]
    if baselines:
        metrics["baseline_reward"] = sum(baselines) / len(baselines)
    for name in sorted({name for rollout in rollouts for name in rollout.reward_parts}):
        values = [
            rollout.reward_parts[name] for rollout in rollouts if name in rollout.reward_parts
        ]
        metrics[f"reward/{name}"] = sum(values) / len(values)
    silent = sum(not rollout.answered for rollout in rollouts)
    metrics["no_answer_fraction"] = silent / max(1, len(rollouts))
    metrics["unverifiable"] = float(sum(rollout.verdict == "unverifiable" for rollout in rollouts))
    metrics["verifier_kills"] = float(sum(rollout.verifier_kills for rollout in rollouts))
    return metrics
