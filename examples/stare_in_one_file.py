"""Reinforcement learning with STARE in one file, short enough to read in one session.

    python examples/stare_in_one_file.py                      keeps entropy at its target
    python examples/stare_in_one_file.py --loss grpo_ds       loses entropy

The quickstart's task and model in one process, with only torch and transformers: sample responses,
verify them, turn rewards into advantages, select the tokens that decide about entropy, weight them,
take a gradient step. The package adds scale: sharded models, rollout servers, packing, checkpoints.
The formulas are those of the package (losses/stare.py), and a test compares `stare_loss` with
them.

Shape legend: B responses of a step, S their padded length, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_stare.compare.worlds.mirror_grid import character_tokenizer, make_world
from megatron_stare.scoring.mirror_grid import mirror_grid_reward

PROMPTS, SAMPLES, MAX_TOKENS = 32, 8, 25
TARGET_ENTROPY = 0.3  # nats per token
TOP_P = 0.1  # the fraction of tokens of either side that is reweighted
ALPHA, W_MAX, M_MIN = 0.05, 2.0, 0.5  # step and bounds of W and M


# ---- rollout: sample responses, verify them ----


@torch.no_grad()
def sample(model: Any, prompt_BS: Tensor, end: int) -> tuple[Tensor, Tensor]:
    """Responses [B, MAX_TOKENS] at T = 1, and the mask of their tokens, the end token included."""
    tokens, cache, response = prompt_BS, None, []
    running_B = torch.ones(len(prompt_BS), dtype=torch.bool)
    mask = []
    for _ in range(MAX_TOKENS):
        output = model(tokens, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        tokens = torch.multinomial(output.logits[:, -1].softmax(-1), 1)
        response.append(tokens[:, 0])
        mask.append(running_B)
        running_B = running_B & (tokens[:, 0] != end)
    return torch.stack(response, 1), torch.stack(mask, 1)


def rollout(model: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> tuple[Tensor, ...]:
    """SAMPLES responses to each problem: prompts, responses, mask [B, S] and rewards [B]."""
    rows = [row for row in rows for _ in range(SAMPLES)]
    prompt_BS = torch.tensor([tokenizer.encode(row["prompt"]) for row in rows])  # all of one length
    response_BS, mask_BS = sample(model, prompt_BS, tokenizer.eos_token_id)
    rewards = []
    for row, response, mask in zip(rows, response_BS, mask_BS, strict=True):
        text = tokenizer.decode(response[mask], skip_special_tokens=False)
        rewards.append(mirror_grid_reward(text, row["label"], {}))
    return prompt_BS, response_BS, mask_BS, torch.tensor(rewards)


def with_signal(
    model: Any, tokenizer: Any, problems: list[dict[str, Any]], dice: random.Random
) -> tuple[tuple[Tensor, ...], float]:
    """Dynamic sampling: up to four rounds, until PROMPTS groups have differing rewards, because a
    group of equal rewards has no advantage. Also the mean reward of all samples.
    """
    kept, rewards = [], []
    for _ in range(4):
        batch = rollout(model, tokenizer, dice.sample(problems, PROMPTS))
        rewards.append(batch[-1])
        groups = batch[-1].view(-1, SAMPLES)
        differ = (groups.max(1).values > groups.min(1).values).repeat_interleave(SAMPLES)
        kept.append([column[differ] for column in batch])
        if sum(len(part[0]) for part in kept) >= PROMPTS * SAMPLES:
            break
    if not any(len(part[0]) for part in kept):
        raise SystemExit("no group has differing rewards; raise --cold-start-steps")
    columns = [torch.cat(column)[: PROMPTS * SAMPLES] for column in zip(*kept, strict=True)]
    return tuple(columns), torch.cat(rewards).mean().item()


# ---- from reward to advantage ----


def advantages(reward_B: Tensor) -> Tensor:
    """GRPO: A = (R - mean) / (standard deviation + 1e-6), inside each group of SAMPLES."""
    groups = reward_B.view(-1, SAMPLES)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, keepdim=True) + 1e-6)).flatten()


# ---- STARE ----


def top(surprisal: Tensor, side: Tensor) -> Tensor:
    """Mask of the ceil(n P) most surprising of the n tokens in `side`."""
    count = math.ceil(round(int(side.sum()) * TOP_P, 9))
    chosen = torch.zeros_like(side).flatten()
    ranked = surprisal.masked_fill(~side, -math.inf).flatten()
    chosen[ranked.topk(count).indices] = True
    return chosen.view_as(side)


class Gate:
    """Closed loop: W and M act only while the batch's entropy is below its target. Each step below
    the target moves them further from 1, each step above it back.
    """

    def __init__(self) -> None:
        self.w, self.m, self.on = 1.1, 0.9, False

    def look(self, entropy: float) -> None:
        step = ALPHA * math.copysign(1.0, TARGET_ENTROPY - entropy)
        self.w = min(max(self.w + step, 1.0), W_MAX)
        self.m = min(max(self.m - step, M_MIN), 1.0)
        self.on = entropy < TARGET_ENTROPY


def stare_loss(
    log_prob: Tensor, advantage: Tensor, mask: Tensor, w: float, m: float, on: bool
) -> Tensor:
    """- mean over tokens of omega A pi / pi_old, where one gradient step makes pi_old = pi.

    omega = W on the most surprising tokens of A > 0 (these raise entropy), M on the most surprising
    tokens of A < 0 (these lower it), 1 elsewhere and while the gate is off.
    """
    surprisal, omega = -log_prob.detach(), torch.ones_like(log_prob)
    if on:
        omega[top(surprisal, mask & (advantage > 0))] = w
        omega[top(surprisal, mask & (advantage < 0))] = m
    ratio = torch.exp(log_prob - log_prob.detach())  # 1, with the gradient of ln pi
    return -(omega * advantage * ratio)[mask].mean()


# ---- learning ----


def scored(model: Any, prompt_BS: Tensor, response_BS: Tensor) -> tuple[Tensor, Tensor]:
    """ln pi of each response token, with gradient, and the entropy [nats]; both [B, S]."""
    logits_BSV = model(torch.cat([prompt_BS, response_BS], 1)).logits[
        :, prompt_BS.shape[1] - 1 : -1
    ]
    log_BSV = logits_BSV.log_softmax(-1)
    entropy_BS = -(log_BSV.exp() * log_BSV).sum(-1).detach()
    return log_BSV.gather(-1, response_BS[..., None])[..., 0], entropy_BS


def descend(model: Any, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def cold_start(model: Any, tokenizer: Any, rows: list[dict[str, str]], steps: int) -> None:
    """Supervised steps on walks with errors: a policy that RL can improve."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
    for step in range(steps):
        batch = rows[step * 128 % len(rows) :][:128]
        prompt_BS = torch.tensor([tokenizer.encode(row["prompt"]) for row in batch])
        walks = [torch.tensor(tokenizer.encode(row["response"])) for row in batch]
        response_BS = torch.nn.utils.rnn.pad_sequence(walks, batch_first=True)  # [pad] is 0
        optimizer.param_groups[0]["lr"] = 5e-3 * (0.05 + 0.95 * (1 - step / steps))
        log_prob, _ = scored(model, prompt_BS, response_BS)
        descend(model, optimizer, -log_prob[response_BS != 0].mean())


def train(options: argparse.Namespace, model: Any, tokenizer: Any, world: Path) -> list[float]:
    """All RL steps. Returns each step's entropy."""
    problems = lines(world / "train.jsonl")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    gate, dice, history = Gate(), random.Random(options.seed), []
    for step in range(options.steps):
        batch, reward = with_signal(model, tokenizer, problems, dice)
        prompt_BS, response_BS, mask_BS, reward_B = batch
        advantage_BS = advantages(reward_B)[:, None].expand_as(response_BS)
        log_prob_BS, entropy_BS = scored(model, prompt_BS, response_BS)
        entropy = entropy_BS[mask_BS].mean().item()
        gate.look(entropy)
        on = gate.on and options.loss == "stare"
        descend(
            model,
            optimizer,
            stare_loss(log_prob_BS, advantage_BS, mask_BS, gate.w, gate.m, on),
        )
        history.append(entropy)
        if step % 20 == 0 or step == options.steps - 1:
            weights = f"  W {gate.w:.2f}  M {gate.m:.2f}" if on else ""
            print(f"step {step:3}  entropy {entropy:.3f}  reward {reward:.3f}{weights}", flush=True)
    return history


def solved(model: Any, tokenizer: Any, problems: list[dict[str, Any]]) -> float:
    """pass@8: the fraction of problems that at least one of SAMPLES responses solves."""
    rewards = rollout(model, tokenizer, problems)[-1].view(-1, SAMPLES)
    return rewards.amax(1).mean().item()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description="STARE on the quickstart's task, in one file")
    parser.add_argument("--loss", choices=["stare", "grpo_ds"], default="stare")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--cold-start-steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    with tempfile.TemporaryDirectory() as name:
        world = Path(name)
        make_world(world, options.seed)
        model, tokenizer = (
            AutoModelForCausalLM.from_pretrained(world / "model"),
            character_tokenizer(),
        )
        cold_start(model, tokenizer, lines(world / "cold_start.jsonl"), options.cold_start_steps)
        history = train(options, model, tokenizer, world)
        hard = solved(model, tokenizer, lines(world / "heldout_hard.jsonl"))
        print(f"held-out HARD problems solved, pass@{SAMPLES}: {hard:.3f}")
    return history


if __name__ == "__main__":
    main()
