"""Alarms, printed when they occur: entropy out of its band, spikes, drifts, repetition, NaN.

Each alarm looks at the metrics of a step and of the steps before. When its condition has held for
its number of steps in a row, it is printed once, to stderr and to run.dir/alarms.jsonl; again only
where it has ceased in between, and after `alarms.window` steps. Checkpoints keep its memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy

from megatron_stare.config import AlarmsConfig, Config, RunAlarm
from megatron_stare.losses import objective_of
from megatron_stare.policy.topology import Topology
from megatron_stare.records import EVERY_RANK, Group, Rollout
from megatron_stare.reporting.logbook import Alarm, append_alarm, cut_alarms
from megatron_stare.reporting.problem_scores import count_reflections
from megatron_stare.system import BestEffort

MOST_NAMED = 8
MOST_DEVIATIONS = 6.0  # of the z statistic: exact sampling exceeds it twice in 10^9 steps
# A tail is repeated that is a stretch of at most LONGEST_STRETCH tokens, written at least
# FEWEST_REPEATS times, over at least SHORTEST_TAIL tokens.
LONGEST_STRETCH, FEWEST_REPEATS, SHORTEST_TAIL = 64, 4, 32
_FORMAT = {"truncated_fraction": "are cut off", "no_answer_fraction": "give no answer"}
_REMEMBERED = ("gamma", "grad_norm", "response_length", *_FORMAT, "reward", "accuracy")
_FEWEST = 10  # steps before a median means anything
_PATIENT = ("entropy", "weight", "length", "format")  # must hold for alarms.patience steps

REMEDIES = {
    "selection": "set loss.select=rising, or lower loss.top_p_ratio",
    "weight": "raise loss.w_max, or lower optimizer.lr",
    "gradient": "lower optimizer.lr or optimizer.clip_grad; look at the step's rollouts",
    "mismatch": "the engine computes otherwise or holds other weights: check dtype and "
    "sglang.verify_weights, or set mismatch.correction=token_tis",
    "exactness": "the engine samples from another distribution: check its temperature, top_p and "
    "weights, and run `parity`",
    "length": "look at the step's rollouts; set scoring.overlong_buffer_len against longer ones",
    "format": "raise rollout.rollout_max_response_len, check the chat template and "
    "scoring.extraction, or set scoring.overlong_filter=true",
    "repeated": "lower optimizer.lr and continue from a checkpoint before that step (--load)",
    "reward": "the reward pays for something else than right answers: look at the rollouts and at "
    "scoring.rewards",
    "nonfinite": "continue from a checkpoint before that step (--load) with a lower optimizer.lr",
}


class Alarms:
    """The alarms of one run. Every rank knows the same; the first one prints."""

    def __init__(self, config: Config, topology: Topology, target: float | None) -> None:
        self.config, self.topology, self.target = config, topology, target
        self.settings: AlarmsConfig = config.alarms
        self.stopping = ""  # the message of the alarm that ends the run
        self._history: dict[str, list[float]] = {name: [] for name in _REMEMBERED}
        self._first_entropy: float | None = None
        self._best_effort = BestEffort("the report lacks this alarm")
        self._since: dict[str, int] = {}  # the first step of those for which a condition has held
        self._printed: dict[str, int] = {}
        self._suspects: dict[str, list[list[int]]] = {}

    def look(self, groups: Sequence[Group]) -> dict[str, float]:
        """reflections: words of evaluation.reflection_words per rollout; repeated_fraction: of the
        rollouts, those that end in one stretch over and over. Keeps who is concerned. Collective.
        """
        words, topology = self.config.evaluation.reflection_words, self.topology
        reflections, looping = 0, list[list[int]]()
        for group in groups:
            held = group.holder in (EVERY_RANK, topology.rank)
            if not held or (group.holder == EVERY_RANK and not topology.is_first):
                continue
            for sample, rollout in enumerate(group.rollouts):
                assert isinstance(rollout, Rollout), "it is held here"
                reflections += count_reflections(rollout.text, words)
                if repeats(rollout.response_ids):
                    looping.append([group.prompt.index, sample])
        everyone = topology.gather((reflections, len(looping), looping[:MOST_NAMED]))
        total = max(1, sum(len(group.rollouts) for group in groups))
        named = [pair for each in everyone for pair in each[2]]
        self._suspects |= _suspects(groups) | {"repeated": named}
        return {
            "reflections": sum(each[0] for each in everyone) / total,
            "repeated_fraction": sum(each[1] for each in everyone) / total,
        }

    def suspect(self, name: str, rollout: tuple[int, int] | None) -> None:
        """Keep a rollout that another part of the program found suspicious, for the alarms."""
        self._suspects[name] = [] if rollout is None else [[*rollout]]

    def watch(self, step: int, metrics: Mapping[str, float]) -> None:
        """Look at the metrics of a step that is written. `stopping` is set where an alarm of
        alarms.stop is raised.
        """
        stopping = ""
        for name, message in self._messages(metrics):
            if message is None:
                self._since.pop(name, None)
                continue
            first = self._since.setdefault(name, step)
            patience = self.settings.patience if name in _PATIENT else 1
            printed = self._printed.get(name)
            quiet = printed is not None and step - printed < self.settings.window
            same = printed is not None and printed >= first  # it has held since it was printed
            if step - first + 1 < patience or quiet or (same and name not in self.settings.stop):
                continue
            self._printed[name] = step
            if self.topology.is_first:
                self._tell(step, name, message, first, self._remedy(name, metrics))
            if name in self.settings.stop:
                stopping = (
                    stopping or f"step {step}: {name}: {message}; {self._remedy(name, metrics)}"
                )
        for name, values in self._history.items():
            if name in metrics:
                values.append(metrics[name])
                del values[: -self.settings.window]
        self._suspects = {}
        if self.settings.stop:
            self.stopping = self.topology.gather(stopping)[0]

    def end(self) -> None:
        """RunAlarm where an alarm ended the run, on every rank."""
        if self.stopping:
            raise RunAlarm(f"{self.stopping} (alarms.stop={self.settings.stop})")

    def state(self) -> dict[str, Any]:
        """Numbers and names for a checkpoint."""
        return {
            "history": {name: [*values] for name, values in self._history.items()},
            "first_entropy": self._first_entropy,
            "since": dict(self._since),
            "printed": dict(self._printed),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        for name, values in state["history"].items():
            self._history[name] = [*values]
        self._first_entropy = state["first_entropy"]
        self._since = dict(state["since"])
        self._printed = dict(state["printed"])

    def forget_after(self, step: int) -> None:
        """Leave out of the file what later steps raised: the run is about to repeat them."""
        if self.topology.is_first:
            cut_alarms(Path(self.config.run.dir), step)

    def _remedy(self, name: str, metrics: Mapping[str, float]) -> str:
        """The remedy for the entropy: settings that this run's objective reads."""
        if name != "entropy":
            return REMEDIES[name]
        loss, reference = self.config.loss, self.target or self._first_entropy or 0.0
        objective = objective_of(loss)
        weighs = objective.reads("w_max")
        if metrics["entropy"] > reference:
            return "lower optimizer.lr" + (" or loss.reweight_w" if weighs else "")
        if not weighs:
            target = f"loss.target_entropy={reference:.3g}"
            return f"set loss.reweight=stare loss.adaptive=true {target}, or lower optimizer.lr"
        if loss.adaptive:
            return "raise loss.w_max or loss.alpha, or lower optimizer.lr"
        return "set loss.adaptive=true, or raise loss.reweight_w"

    def _tell(self, step: int, name: str, message: str, first: int, remedy: str) -> None:
        rollouts = self._suspects.get(name, [])[:MOST_NAMED]
        alarm = Alarm(step, name, message, first, remedy, rollouts)
        self._best_effort(lambda: append_alarm(Path(self.config.run.dir), alarm))
        since = f" since step {first}" if first < step else ""
        named = ", ".join(f"{sample} of prompt {prompt}" for prompt, sample in rollouts[:3])
        where = f" (rollout {named})" if named else ""
        print(
            f"alarm at step {step}: {name}: {message}{since}{where}; {remedy}",
            file=sys.stderr,
            flush=True,
        )

    def _messages(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str | None]]:
        """Every alarm that this step can say anything about, and what is wrong; None: nothing."""
        settings = self.settings
        if "entropy" in metrics:
            yield "entropy", self._entropy(metrics["entropy"])
        if metrics.get("gate"):
            yield "selection", self._selection(metrics)
        if "gate" in metrics:
            yield "weight", self._weight(metrics)
        if "grad_norm" in metrics:
            yield "gradient", self._unusual("grad_norm", metrics, settings.gradient)
        if "logprob_diff_mean" in metrics:
            value, limit = metrics["logprob_diff_mean"], settings.mismatch
            message = (
                f"trainer and engine differ by {value:.3g} nats a token on average, above "
                f"alarms.mismatch={limit:g}"
            )
            yield "mismatch", message if limit and value > limit else None
        if "exactness_z" in metrics and "entropy" in metrics:
            yield "exactness", self._exactness(metrics)
        if "response_length" in metrics:
            limit = settings.length
            yield "length", self._unusual("response_length", metrics, limit, or_below=True)
        if "truncated_fraction" in metrics:
            yield "format", self._format(metrics)
        if "repeated_fraction" in metrics:
            value, limit = metrics["repeated_fraction"], settings.repeated
            message = f"{value:.0%} of the rollouts end in one stretch over and over"
            yield "repeated", message if limit and value > limit else None
        if "accuracy" in metrics and "reward" in metrics:
            yield "reward", self._reward()
        message = "a statistic or the gradient is not finite"
        yield "nonfinite", message if metrics.get("nonfinite") else None

    def _entropy(self, entropy: float) -> str | None:
        if self._first_entropy is None:
            self._first_entropy = entropy
        reference, name = self.target, "the target"
        if reference is None:
            reference, name = self._first_entropy, "the first step's"
        low, high = self.settings.entropy_low, self.settings.entropy_high
        if entropy < low * reference:
            return f"{entropy:.3g} nats is below {low:g} times {name} {reference:.3g}"
        if high and entropy > high * reference:
            return f"{entropy:.3g} nats is above {high:g} times {name} {reference:.3g}"
        return None

    def _exactness(self, metrics: Mapping[str, float]) -> str | None:
        """Needs both: z grows with the tokens, so that rounding alone moves it in a large batch."""
        if not self.settings.exactness:
            return None
        limit = self.settings.exactness * metrics["entropy"]
        for key in (key for key in metrics if key.startswith("exactness_z")):
            z, gap = metrics[key], metrics[key.replace("_z", "_gap")]
            if abs(z) > MOST_DEVIATIONS and abs(gap) > limit:
                whose = key.removeprefix("exactness_z").lstrip("_").replace("_", " ")
                return (
                    f"sampled tokens{f' of {whose}' if whose else ''} are {abs(gap):.3g} nats "
                    f"{'more' if gap > 0 else 'less'} surprising than the policy's own, "
                    f"{abs(z):.3g} standard deviations, beyond {self.settings.exactness:g} of the "
                    "entropy (alarms.exactness)"
                )
        return None

    def _selection(self, metrics: Mapping[str, float]) -> str | None:
        patience = self.settings.patience
        recent = self._history["gamma"][-patience:]
        if len(recent) < patience or "gamma" not in metrics or (middle := median(recent)) > 0:
            return None
        share = metrics.get("rising_share_positive", 0.0)
        return (
            f"L+ lowers entropy (the median gamma of {patience} steps is {middle:.2g}; {share:.0%} "
            "of L+ raise entropy in this step), a larger W even more"
        )

    def _weight(self, metrics: Mapping[str, float]) -> str | None:
        bound = self.config.loss.w_max
        stands = metrics["gate"] and metrics.get("weight_w", 0.0) >= bound
        if not stands or self.config.loss.reweight_w >= bound:
            return None
        return f"W stands at its bound loss.w_max={bound:g} and entropy below its target"

    def _median(self, name: str) -> float | None:
        values = self._history[name]
        return median(values) if len(values) >= _FEWEST else None

    def _unusual(
        self, name: str, metrics: Mapping[str, float], limit: float, *, or_below: bool = False
    ) -> str | None:
        """The metric is above `limit` times its median or, if `or_below`, below 1/limit of it."""
        value, middle = metrics[name], self._median(name)
        if not limit or middle is None:
            return None
        if value > limit * middle:
            return f"{name} {value:.3g} is above {limit:g} times its median {middle:.3g}"
        if or_below and value * limit < middle:
            return f"{name} {value:.3g} is below 1/{limit:g} of its median {middle:.3g}"
        return None

    def _format(self, metrics: Mapping[str, float]) -> str | None:
        limit = self.settings.format
        for name, what in _FORMAT.items():
            value, usual = metrics.get(name, 0.0), self._median(name)
            if limit and usual is not None and value > usual + limit:
                return f"{value:.0%} of the rollouts {what}, {usual:.0%} usually"
        return None

    def _reward(self) -> str | None:
        """The alarm's text where reward rose and accuracy fell from the window's first half to its
        second; None: they did not.
        """
        half, limit = self.settings.window // 2, self.settings.reward
        rewards, accuracies = self._history["reward"], self._history["accuracy"]
        if not limit or min(len(rewards), len(accuracies)) < self.settings.window:
            return None
        was, is_now = fmean(rewards[:half]), fmean(rewards[half:])
        right, still = fmean(accuracies[:half]), fmean(accuracies[half:])
        if is_now <= was or still >= right - limit:
            return None
        return (
            f"reward went from {was:.3g} to {is_now:.3g} and accuracy from {right:.3g} to "
            f"{still:.3g} over {self.settings.window} steps"
        )


def repeats(ids: numpy.ndarray) -> bool:
    """Whether the end of a response repeats one stretch of tokens."""
    tail = ids[-max(LONGEST_STRETCH * FEWEST_REPEATS, SHORTEST_TAIL) :]
    if len(tail) < SHORTEST_TAIL:
        return False
    before = tail[-1 - LONGEST_STRETCH : -1][::-1]
    for stretch in (numpy.flatnonzero(before == tail[-1]) + 1).tolist():
        length = max(stretch * FEWEST_REPEATS, SHORTEST_TAIL)
        if length <= len(tail) and (tail[-length:-stretch] == tail[stretch - length :]).all():
            return True
    return False


def _suspects(groups: Sequence[Group]) -> dict[str, list[list[int]]]:
    """The rollouts to look at: the longest, those without an end or an answer, wrong ones with the
    highest reward.
    """
    every = [
        ([group.prompt.index, sample], rollout)
        for group in groups
        for sample, rollout in enumerate(group.rollouts)
    ]
    longest = sorted(every, key=lambda pair: -pair[1].length)
    paid = [pair for pair in every if pair[1].verdict == "wrong" and pair[1].reward is not None]
    paid.sort(key=lambda pair: -(pair[1].reward or 0.0))
    cut = [place for place, r in every if r.status == "truncated" or not r.answered]
    return {
        "length": [place for place, _ in longest[:MOST_NAMED]],
        "format": cut[:MOST_NAMED],
        "reward": [place for place, _ in paid[:MOST_NAMED]],
    }
