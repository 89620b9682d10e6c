"""Why a few surprising tokens decide about entropy: STARE's theory on ten tokens and on a model.

    python examples/four_quadrants.py --output four_quadrants

A policy-gradient step of size eta on a token a with advantage A adds eta A (1[i = a] - p_i) to
logit i of the softmax p. The derivative of entropy H by logit i is p_i (s_i - H), s = -ln p. So the
step changes entropy by eta A g to first order:

    g_a = p_a (s_a - H) - c        c = sum_i p_i^2 (s_i - H)                    (arXiv 2606.19236)

1. Sign table: g < 0 for probable tokens and > 0 beyond a critical surprisal s*, so A and g form
   four quadrants. Both columns of measured changes take a real step, in float64.
2. Neutrality: sum_a p_a g_a = 0. Sampling alone does not change entropy on average; a correlation
   of A and g does.
3. Near-criticality, on the toy in expectation and on the quickstart's model after its cold start:
   over a batch the quadrants mostly cancel, so a weight on the few most surprising tokens of A > 0
   turns the sign of the sum. The sum is zero at W* = 1 + Lambda / Gamma, with Lambda = - sum A g
   and Gamma = the sum of A g over L+.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

import stare_in_one_file as one

QUADRANTS = {
    (True, True): "A > 0, g > 0: entropy up, a success that was a surprise",
    (True, False): "A > 0, g < 0: entropy down, a success that was expected",
    (False, True): "A < 0, g > 0: entropy down, a failure that was a surprise",
    (False, False): "A < 0, g < 0: entropy up, a failure that was expected",
}
COLOURS = {
    (True, True): "#0072B2",
    (True, False): "#D55E00",
    (False, True): "#E69F00",
    (False, False): "#56B4E9",
}


def entropy_of(logits: Tensor) -> Tensor:
    """H [nats] over the last axis."""
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def sensitivity(logits: Tensor) -> Tensor:
    """g of every token of the vocabulary, [..., V]."""
    log_p = logits.log_softmax(-1)
    slope = log_p.exp() * (-log_p - entropy_of(logits)[..., None])
    return slope - (log_p.exp() * slope).sum(-1, keepdim=True)


def step_on(logits: Tensor, token: int, advantage: float, eta: float) -> Tensor:
    """The logits after one policy-gradient step on one token."""
    gradient = -logits.softmax(-1)
    gradient[token] += 1
    return logits + eta * advantage * gradient


def toy(console: Console) -> dict[str, list[float]]:
    """Ten tokens, each half as probable as the one before: formula, measured change, neutrality."""
    logits = -0.7 * torch.arange(10, dtype=torch.float64)
    p, g, before, eta = logits.softmax(-1), sensitivity(logits), entropy_of(logits), 1e-6
    table = Table(title=f"a softmax of ten tokens, H = {before:.3f} nats; changes per unit step")
    for column in ("p", "surprisal", "g", "dH for A = +1", "dH for A = -1"):
        table.add_column(column, justify="right")
    for token in range(10):
        changes = [
            float((entropy_of(step_on(logits, token, advantage, eta)) - before) / eta)
            for advantage in (1.0, -1.0)
        ]
        numbers = (p[token], -p[token].log(), g[token], *changes)
        table.add_row(*(f"{number:.4f}" for number in numbers))
    console.print(table)
    console.print(f"neutrality: sum p g = {float((p * g).sum()):.1e}")
    weight, plain, balanced = toy_balance(logits, (torch.arange(10) % 2 == 0).double())
    console.print(
        f"every second token is right: dH = {plain:+.4f} per unit step; with W* = {weight:.2f} on "
        f"the surprising right ones {balanced:+.1e}\n"
    )
    return {"surprisal": (-p.log()).tolist(), "g": g.tolist(), "p": p.tolist()}


def toy_balance(logits: Tensor, reward: Tensor, eta: float = 1e-6) -> tuple[float, float, float]:
    """The critical weight of the quadrant A > 0, g > 0 under a reward of each token, and the
    measured changes of entropy by an expected step without and with this weight.
    """
    p, g = logits.softmax(-1), sensitivity(logits)
    advantage = reward - (p * reward).sum()
    chosen = (advantage > 0) & (g > 0)
    drift, gamma = (p * advantage * g).sum(), (p * advantage * g)[chosen].sum()
    weight = 1 - drift / gamma
    changes = []
    for omega in (torch.ones_like(p), torch.where(chosen, weight, 1.0)):
        pull = p * omega * advantage  # of each token on its own logit; it lowers all other logits
        moved = logits + eta * (pull - p * pull.sum())
        changes.append(float((entropy_of(moved) - entropy_of(logits)) / eta))
    return float(weight), changes[0], changes[1]


def model_batch(seed: int, cold_start_steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Advantage, sensitivity and surprisal of each token of a batch of the quickstart's model."""
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as name:
        world = Path(name)
        one.make_world(world, seed)
        model = one.AutoModelForCausalLM.from_pretrained(world / "model")
        tokenizer = one.character_tokenizer()
        one.cold_start(model, tokenizer, one.lines(world / "cold_start.jsonl"), cold_start_steps)
        problems = one.lines(world / "train.jsonl")
        batch, _ = one.with_signal(model, tokenizer, problems, random.Random(seed))
    prompt_BS, response_BS, mask_BS, reward_B = batch
    with torch.no_grad():
        both_BS = torch.cat([prompt_BS, response_BS], 1)
        logits_BSV = model(both_BS).logits[:, prompt_BS.shape[1] - 1 : -1].double()
    at = response_BS[..., None]
    g_BS = sensitivity(logits_BSV).gather(-1, at)[..., 0]
    surprisal_BS = -logits_BSV.log_softmax(-1).gather(-1, at)[..., 0]
    advantage_BS = one.advantages(reward_B)[:, None].expand_as(g_BS).double()
    return advantage_BS[mask_BS], g_BS[mask_BS], surprisal_BS[mask_BS]


def quadrants(advantage: Tensor, g: Tensor) -> dict[tuple[bool, bool], Tensor]:
    """The mask of each quadrant, by (A > 0, g > 0)."""
    return {(up, rises): ((advantage > 0) == up) & ((g > 0) == rises) for up, rises in QUADRANTS}


def criticality(
    console: Console, advantage: Tensor, g: Tensor, surprisal: Tensor
) -> dict[str, float]:
    """Fractions and sums of a batch's quadrants, and the weight at which the sums cancel."""
    change = advantage * g
    table = Table(title=f"{len(change)} tokens of the quickstart's model")
    for column in ("quadrant", "tokens", "sum A g"):
        table.add_column(column, justify="left" if column == "quadrant" else "right")
    for quadrant, mask in quadrants(advantage, g).items():
        share, total = float(mask.double().mean()), float(change[mask].sum())
        table.add_row(QUADRANTS[quadrant], f"{share:.1%}", f"{total:+.2f}")
    console.print(table)
    chosen = one.top(surprisal, advantage > 0)
    drift, gamma = float(change.sum()), float(change[chosen].sum())
    found = {
        "drift": drift,
        "left": abs(drift) / float(change.abs().sum()),
        "gamma": gamma,
        "rising_share": float((g[chosen] > 0).double().mean()),
        "critical_weight": 1 - drift / gamma,
    }
    console.print(
        f"sum A g = {drift:+.2f}, {found['left']:.1%} of the sum of |A g|\n"
        f"L+: {int(chosen.sum())} tokens, {found['rising_share']:.0%} of them with g > 0, "
        f"Gamma = {gamma:+.2f}; W* = 1 + Lambda / Gamma = {found['critical_weight']:.2f}"
    )
    return found


def draw(
    path: Path, toy_curve: dict[str, list[float]], batch: tuple[Tensor, Tensor, Tensor]
) -> None:
    """g over surprisal on the toy; A g over surprisal on the model, a colour per quadrant."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    left.axhline(0, color="#b8b8b8", linewidth=0.8)
    left.plot(toy_curve["surprisal"], toy_curve["g"], "o-", color="#222222")
    left.set(title="Sensitivity of entropy, ten tokens", xlabel="surprisal [nats]", ylabel="g")
    advantage, g, surprisal = batch
    right.axhline(0, color="#b8b8b8", linewidth=0.8)
    for quadrant, mask in quadrants(advantage, g).items():
        change: Any = (advantage * g)[mask]
        label = QUADRANTS[quadrant].split(":")[0]
        right.plot(surprisal[mask], change, ".", color=COLOURS[quadrant], label=label, alpha=0.5)
    right.set(title="A batch of the quickstart's model", xlabel="surprisal [nats]", ylabel="A g")
    right.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=140)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description="STARE's four quadrants, on a toy and on a model")
    parser.add_argument("--output", type=Path, default=Path("four_quadrants"))
    parser.add_argument("--cold-start-steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    console = Console()
    curve = toy(console)
    batch = model_batch(options.seed, options.cold_start_steps)
    found = criticality(console, *batch)
    options.output.mkdir(parents=True, exist_ok=True)
    draw(options.output / "four_quadrants.png", curve, batch)
    console.print(f"plot: {options.output / 'four_quadrants.png'}")
    return found


if __name__ == "__main__":
    main()
