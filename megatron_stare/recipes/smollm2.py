"""A pretrained language model on a laptop CPU: SmolLM2-135M-Instruct learns arithmetic.

The model writes no working of its own, so a short cold start shows it three ways to answer; RL then
decides between them. Two data sets of reasoning-gym: chain_sum (two or three numbers of up to two
digits) and lcm (least common multiple of two numbers up to 24).
Fetch the model first: python -m megatron_stare fetch smollm2-135m models/smollm2-135m
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

from megatron_stare.config import (
    ColdStartConfig,
    CompareConfig,
    Config,
    DataConfig,
    DiagnosticsConfig,
    EvaluationConfig,
    LossConfig,
    OptimizerConfig,
    PolicyConfig,
    RolloutConfig,
    RunConfig,
    ScoringConfig,
    TrainConfig,
)
from megatron_stare.system import multiplies_bf16

MODEL = "models/smollm2-135m"
TEACHER = "models/smollm2-135m-grpo"  # written by `convert megatron-to-hf` from a finished run
SUMS = "reasoning_gym:chain_sum?min_terms=2&max_terms=3&min_digits=1&max_digits=2"
MULTIPLES = "reasoning_gym:lcm?min_numbers=2&max_numbers=2&min_value=2&max_value=24"
STARE = ("loss.name=stare", "loss.variant=C2")
CRITICAL = (*STARE, "loss.controller=critical", "loss.w_max=10")
ARMS = {
    "grpo_ds": ["loss.name=dapo"],
    "stare": [*CRITICAL, "loss.select=rising"],
    "stare_low": [*CRITICAL, "loss.select=rising", "loss.target_entropy=0.1"],
    "stare_2_percent": [*CRITICAL, "loss.top_p_ratio=0.02"],
    "stare_paper": list(STARE),
    "stare_adaptive": [*STARE, "loss.adaptive=true", "loss.alpha=0.05", "loss.w_max=2"],
    "bonus": [  # an entropy bonus that follows the same target
        "loss.name=skywork_or1",
        "loss.settings.target=0.2",
        "loss.settings.delta=0.001",
        "loss.settings.coefficient_max=0.1",
    ],
    "repo_r": ["loss.name=repo_r", "loss.settings.target=0.2", "loss.settings.zeta_max=0.5"],
    "distilled": [
        "loss.name=dapo",
        "loss.distillation_coef=1",
        "loss.reward_coef=0",
        "rollout.dynamic_sampling=false",
        f"policy.ref_hf_checkpoint={TEACHER}",
    ],
}
ADAPTED = {  # LoRA; at ten times the learning rate of the weights unless the name ends in _1x
    f"{arm}_rank{rank}{suffix}": [*ARMS[arm], f"adapters.rank={rank}", *rate]
    for arm in ("grpo_ds", "stare")
    for rank in (1, 8, 32)
    for suffix, rate in {"": ["optimizer.lr=1e-4"], "_1x": []}.items()
}
DEMONSTRATIONS = 1200


def smollm2_135m() -> Config:
    """Sums. 6 prompts x 8, T=1, one gradient step per batch; GRPO-ds against STARE C2 limited to
    tokens that raise entropy. 50 steps show entropy fall or stay; the study of docs/results.md has
    150. An arm needs 6 to 10 GB. A CPU that is slow at bf16 trains in fp32.
    """
    return _study("smollm2_135m", SUMS, "sums", steps=50)


def smollm2_135m_lcm() -> Config:
    """Least common multiples, otherwise as smollm2_135m; 150 steps."""
    return _study("smollm2_135m_lcm", MULTIPLES, "multiples", steps=150)


def _study(name: str, task: str, demonstrations: str, steps: int) -> Config:
    return Config(
        run=RunConfig(dir=f"runs/{name}", save_interval=25),
        data=DataConfig(
            prompt_data=f"{task}&size=4000&seed=1",
            system_prompt="Calculate.",
            rollout_max_prompt_len=64,
            drop_evaluation_prompts=True,
        ),
        policy=PolicyConfig(
            hf_checkpoint=MODEL,
            dtype="bf16" if multiplies_bf16() else "fp32",
            max_tokens_per_gpu=1024,
            shared_prompts=True,
        ),
        optimizer=OptimizerConfig(lr=1e-5, lr_warmup_iters=3),
        rollout=RolloutConfig(
            rollout_batch_size=6,
            over_sampling_batch_size=8,
            n_samples_per_prompt=8,
            rollout_max_response_len=64,
            max_generation_rounds=4,
            accept_partial_batch=True,
        ),
        scoring=ScoringConfig(reward="reasoning_gym", extraction="answer"),
        loss=LossConfig(target_entropy=0.2),
        train=TrainConfig(num_rollout=steps),
        evaluation=EvaluationConfig(
            eval_interval=50,
            eval_data={"heldout": f"{task}&size=100&seed=2"},
            n_samples_per_eval_prompt=8,
        ),
        diagnostics=DiagnosticsConfig(interval=25),
        cold_start=ColdStartConfig(
            data=f"megatron_stare.recipes.smollm2.{demonstrations}",
            steps=24,
            batch_size=16,
            lr=1.5e-4,
        ),
        compare=CompareConfig(arms=ARMS | ADAPTED, run=["grpo_ds", "stare"]),
    )


def sums() -> Iterator[dict[str, Any]]:
    """Conversations with right answers: a fifth without working, the others with running totals or
    with tens and ones apart. The problems are chain_sum's, written as chain_sum writes them.
    """
    rng = random.Random(3)
    for _ in range(DEMONSTRATIONS):
        numbers = [rng.randrange(1, 10 ** rng.choice((1, 2))) for _ in range(rng.choice((2, 3)))]
        terms = [numbers[0], *(rng.choice((1, -1)) * number for number in numbers[1:])]
        style = rng.choice((_plain, _totals, _totals, _columns, _columns))
        yield _conversation(
            f"State the final answer to the following arithmetic problem: {_sum(terms)} =",
            f"{style(terms)}Answer: {sum(terms)}",
        )


def multiples() -> Iterator[dict[str, Any]]:
    """Conversations with right answers: a fifth without working, the others list multiples or
    divide by the greatest common divisor. The problems are written as lcm writes them.
    """
    rng = random.Random(3)
    for _ in range(DEMONSTRATIONS):
        pair = [rng.randrange(2, 25), rng.randrange(2, 25)]
        style = rng.choice((_plain, _listed, _listed, _divided, _divided))
        yield _conversation(
            f"Find the Least Common Multiple (LCM) of these numbers: {pair[0]}, {pair[1]}",
            f"{style(pair)}Answer: {math.lcm(*pair)}",
        )


def _conversation(question: str, answer: str) -> dict[str, Any]:
    turns = (("user", question), ("assistant", answer))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def _sum(terms: list[int]) -> str:
    return " ".join([str(terms[0]), *(f"{'+-'[term < 0]} {abs(term)}" for term in terms[1:])])


def _plain(numbers: list[int]) -> str:
    """Without working."""
    return ""


def _totals(terms: list[int]) -> str:
    """Every partial sum: 12 + 5 = 17, 17 - 9 = 8."""
    totals = [sum(terms[:count]) for count in range(1, len(terms) + 1)]
    pairs = zip(totals, terms[1:], totals[1:], strict=False)
    return ", ".join(f"{_sum([before, term])} = {after}" for before, term, after in pairs) + "\n"


def _columns(terms: list[int]) -> str:
    """Tens and ones apart: tens 10 + 0 = 10, ones 2 - 9 = -7."""
    tens = [int(term / 10) * 10 for term in terms]
    ones = [term - ten for term, ten in zip(terms, tens, strict=True)]
    return f"tens {_sum(tens)} = {sum(tens)}, ones {_sum(ones)} = {sum(ones)}\n"


def _listed(pair: list[int]) -> str:
    """Multiples of the larger number, until the smaller one divides: 24, 48, 72 / 18 = 4.
    By the greatest common divisor where that takes more than six.
    """
    small, large = sorted(pair)
    result = math.lcm(small, large)
    if result > 6 * large:
        return _divided(pair)
    listed = ", ".join(str(multiple) for multiple in range(large, result + 1, large))
    return f"{listed} / {small} = {result // small}\n"


def _divided(pair: list[int]) -> str:
    """The working by the greatest common divisor: gcd 6, 24 / 6 = 4, 4 * 18 = 72."""
    first, second = pair
    divisor = math.gcd(first, second)
    part = first // divisor
    return f"gcd {divisor}, {first} / {divisor} = {part}, {part} * {second} = {part * second}\n"
