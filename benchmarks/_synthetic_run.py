"""Runs that were never trained, written through the real logbook and diagnostics: as long as asked,
with an answer wrong here and right there, and a tool in between.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

from megatron_stare.loop.metrics import QUADRANTS
from megatron_stare.reporting import diagnostics
from megatron_stare.reporting.diagnostics import (
    Density,
    Diagnostics,
    PositionBins,
    Quadrant,
    SampledRollout,
    SurprisalBins,
    Tally,
    TokenRow,
)
from megatron_stare.reporting.logbook import Alarm, Logbook, append_alarm

TARGET = 0.3
WORDS = (
    "So",
    " we",
    " add",
    " the",
    " two",
    " roots",
    ",",
    " wait",
    ",",
    " check",
    ":\n",
    " x",
    " =",
)
PROMPT = "<|im_start|>system\nReason step by step.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
PROMPT += "<|im_start|>assistant\n"


def write_run(
    directory: Path,
    steps: int,
    *,
    loss: str = "stare",
    seed: int = 0,
    every: int = 0,
    tokens: int = 120,
    rollouts: int = 4,
    evaluations: bool = True,
    texts: tuple[str, ...] = WORDS,
) -> Path:
    """A run directory of `steps` steps; every `every`th has diagnostics (0: none) with rollouts of
    about `length` tokens, made of `texts`.
    """
    rng = random.Random(f"{loss}{seed}")
    with Logbook(directory) as book:
        for step in range(1, steps + 1):
            row = _row(rng, step, steps, loss)
            if evaluations and step % max(1, steps // 10) == 0:
                row |= _evaluation(rng, step / steps, loss)
            book.write(step, row)
            if every and (step % every == 0 or step == steps):
                made = _diagnostics(rng, step, row, rollouts, tokens, texts)
                diagnostics.write(directory, made)
    config = f"loss:\n  name: {loss}\n  target_entropy: {TARGET}\nrun:\n  seed: {seed}\n"
    (directory / "config.yaml").write_text(config, encoding="utf-8")
    return directory


def write_alarm(directory: Path, step: int) -> None:
    """One line of alarms.jsonl."""
    message, remedy = "0.12 nats is below 0.5 times the target 0.3", "raise loss.w_max"
    append_alarm(directory, Alarm(step, "entropy", message, max(1, step - 20), remedy, [[12, 0]]))


def _row(rng: random.Random, step: int, steps: int, loss: str) -> dict[str, float]:
    along = step / steps
    held = loss == "stare"
    level = TARGET + 0.25 * math.exp(-6 * along) if held else 0.55 * math.exp(-3 * along)
    entropy = level * (1 + 0.08 * rng.gauss(0, 1))
    shares = [0.05 + 0.02 * rng.random(), 0.45, 0.1, 0.35]
    row = {
        "entropy": entropy,
        "reward": 0.2 + 0.6 * (1 - math.exp(-4 * along)) + 0.04 * rng.gauss(0, 1),
        "response_length": 400 + 300 * along + 20 * rng.gauss(0, 1),
        "truncated_fraction": 0.05 * rng.random(),
        "grad_norm": math.exp(0.3 * rng.gauss(0, 1)),
        "logprob_diff_mean": 0.003 + 0.001 * rng.random(),
        "entropy_drift": (TARGET - entropy) * 0.4 + 0.01 * rng.gauss(0, 1),
        "staleness_mean": rng.random(),
        "staleness_max": float(rng.randrange(3)),
        "engine_restarts": float(step > steps // 2),
        "nonfinite": 0.0,
        "skipped": float(rng.random() < 0.01),
        "gate": float(held and entropy < TARGET),
        "weight_w": 1 + 0.3 * along if held else 1.0,
        "weight_m": 1 - 0.2 * along if held else 1.0,
    }
    row |= {f"quadrant/{name}": share for name, share in zip(QUADRANTS, shares, strict=True)}
    seconds = {"rollout": 30.0, "score": 4.0, "update": 12.0, "sync": 1.5}
    timed = {
        f"seconds_{name}": value * (0.9 + 0.2 * rng.random()) for name, value in seconds.items()
    }
    return row | timed | {"seconds_total": sum(timed.values()) + 0.7}


def _evaluation(rng: random.Random, along: float, loss: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, level in (("heldout_hard", 0.4), ("heldout_easy", 0.8)):
        value = min(1.0, level * (0.4 + 0.6 * along) + 0.03 * rng.random())
        most = min(1.0, value + (0.3 if loss == "stare" else 0.05))
        found |= {f"eval/{name}/avg_at_k": value, f"eval/{name}/pass_at_k": most}
        found[f"eval/{name}/k"] = 8
    return found


def _diagnostics(
    rng: random.Random,
    step: int,
    row: dict[str, float],
    rollouts: int,
    tokens: int,
    texts: tuple[str, ...],
) -> Diagnostics:
    edges = [0.0, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0]
    counts = [int(8000 * math.exp(-at) * (0.8 + 0.4 * rng.random())) for at in range(9)]
    rise = [(-1.0 if at < 5 else 1.5) * count * 1e-7 for at, count in enumerate(counts)]
    fall = [-0.8 * value for value in rise]
    advantages = [-2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0]
    positions = [0, 64, 128, 256, 512, 1024, 2048]
    sampled = [_rollout(rng, step, each, tokens, texts) for each in range(rollouts)]
    table = [
        TokenRow(at, word, 40 - at, (7 - at) * 1e-5, 3.0 - at / 5) for at, word in enumerate(texts)
    ]
    shares = [row[f"quadrant/{name}"] for name in QUADRANTS]
    return Diagnostics(
        step=step,
        entropy=row["entropy"],
        target_entropy=TARGET,
        gate=bool(row["gate"]),
        weight_w=row["weight_w"],
        weight_m=row["weight_m"],
        loss_tokens=20000,
        predicts="objective",
        change=sum(rise) + sum(fall),
        plain_change=row["entropy_drift"],
        quadrants={
            name: Quadrant(int(20000 * share), share * 1e-3, share * 2e-3)
            for name, share in zip(QUADRANTS, shares, strict=True)
        },
        surprisal_bins=SurprisalBins(
            edges, Tally(counts, rise, rise), Tally(counts[::-1], fall, fall)
        ),
        position_bins=PositionBins(
            positions,
            [4000, 4000, 5000, 4000, 3000, 0],
            [1e-5 * rng.gauss(0, 1) for _ in range(6)],
            [0.4, 0.3, 0.28, 0.27, 0.3, None],
            [0.41, 0.31, 0.29, 0.28, 0.31, None],
        ),
        density=Density(
            edges,
            advantages,
            [[int(count * math.exp(-abs(at - 3.5))) for at in range(8)] for count in counts],
        ),
        tokens={"chosen_positive": table, "chosen_negative": table[::-1]},
        rollouts=sampled,
    )


def _rollout(
    rng: random.Random, step: int, sample: int, tokens: int, texts: tuple[str, ...]
) -> SampledRollout:
    text = [texts[rng.randrange(len(texts))] for _ in range(max(8, tokens))]
    third = len(text) // 3
    own = [int(not third <= at < third + third // 4) for at in range(len(text))]
    surprisal = [min(15.0, rng.expovariate(1.5)) for _ in text]
    advantage = 1.2 if sample % 2 == 0 else -0.8

    def known(values: list[float]) -> list[float | None]:
        return [value if mine else None for value, mine in zip(values, own, strict=True)]

    sensitivity = [0.02 * (value - 1.2) * math.exp(-value) for value in surprisal]
    chosen = [
        (1 if advantage > 0 else -1) if value > 2.5 and mine else 0
        for value, mine in zip(surprisal, own, strict=True)
    ]
    return SampledRollout(
        prompt_index=step * 10 + sample // 2,
        sample=sample,
        reward=1.0 if advantage > 0 else 0.0,
        verdict="correct" if advantage > 0 else "wrong",
        finish_reason="completed",
        versions=[step - 1, step],
        prompt=PROMPT.format("What is the sum of the roots of x^2 - 5x + 6 = 0?"),
        label="5",
        advantage=advantage,
        text=text,
        loss_mask=own,
        surprisal=known(surprisal),
        entropy=known([value * 0.8 for value in surprisal]),
        sensitivity=known(sensitivity),
        weight=known([1.5 if each else 1.0 for each in chosen]),
        change=known([advantage * value * 1e-4 for value in sensitivity]),
        chosen=chosen,
    )
