"""STARE in TRL's GRPOTrainer: reweight the advantages of the tokens that decide about entropy.

    tools/other_trainers/build && .venv-trainers/bin/python examples/trl_grpo.py

The clipped surrogate is homogeneous in its advantage, so a token's weight omega > 0 may multiply
the advantage instead of the loss, and TRL takes advantages per token. STARE is one method of a
subclass: score the new samples, select tokens, weight them. The example trains a tiny random model
on a CPU to write digits; replace the three functions below by your own model, data and reward.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from megatron_stare.losses.stare import token_weights

ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz+= "


class StareTrainer(GRPOTrainer):
    """GRPOTrainer with STARE's weights: `target_entropy` [nats per token] is its gate, `weights`
    are settings of losses.stare.token_weights. Each process selects among all tokens of its part of
    a generation.
    """

    def __init__(self, *args: Any, target_entropy: float, weights: dict[str, Any], **kw: Any):
        super().__init__(*args, **kw)
        self.target_entropy, self.weights = target_entropy, weights
        self.history: list[dict[str, float]] = []

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return batch
        mask = batch["completion_mask"] * batch.get("tool_mask", 1)
        with torch.no_grad():
            log_probs, entropy, _ = self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
                torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
                batch["completion_ids"].shape[1],
                batch_size=self.args.per_device_train_batch_size,
                compute_entropy=True,
            )
        mean_entropy = self._mean(entropy, mask)
        advantages = batch["advantages"][:, None] * mask
        omega = token_weights(
            -log_probs, advantages, mask, gate_on=mean_entropy < self.target_entropy, **self.weights
        )
        batch["advantages"] = advantages * omega
        chosen = {"raised": int((omega > 1).sum()), "damped": int((omega < 1).sum())}
        self.history.append({"entropy": mean_entropy, **chosen})
        for name, value in self.history[-1].items():
            self._metrics["train"][f"stare/{name}"].append(value)
        return batch

    def _mean(self, value: torch.Tensor, mask: torch.Tensor) -> float:
        """The mean of `value` over the tokens of all processes."""
        sums = torch.stack([(value * mask).sum(), mask.sum()])
        total, count = self.accelerator.reduce(sums.double(), reduction="sum").tolist()
        return total / max(1.0, count)


def tiny_model() -> Qwen2ForCausalLM:
    """Random weights: two layers, one id per letter and one for the end."""
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(ALPHABET) + 1,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            eos_token_id=0,
            pad_token_id=0,
            bos_token_id=None,
        )
    )


def letters() -> PreTrainedTokenizerFast:
    """The tokenizer: one token per letter."""
    vocabulary = {"<end>": 0} | {letter: number for number, letter in enumerate(ALPHABET, start=1)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")


def digits(completions: list[str], **unused: Any) -> list[float]:
    """The reward: the fraction of digits among the letters."""
    return [
        sum(map(str.isdigit, text)) / max(1, len(text.replace(" ", ""))) for text in completions
    ]


def parts(steps: int, directory: str) -> dict[str, Any]:
    """The arguments of a GRPOTrainer."""
    problems = Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(6) for b in range(6)]})
    settings = GRPOConfig(
        output_dir=directory,
        use_cpu=True,
        bf16=False,
        max_steps=steps,
        learning_rate=1e-2,
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=12,
        loss_type="bnpo",  # the mean over tokens
        epsilon_high=0.28,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    return {
        "model": tiny_model(),
        "reward_funcs": digits,
        "args": settings,
        "train_dataset": problems,
        "processing_class": letters(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--target-entropy", type=float, default=3.6, help="nats per token")
    arguments = parser.parse_args()
    weights = {"variant": "C2", "reweight_w": 1.5, "reweight_m": 0.5}
    with tempfile.TemporaryDirectory() as directory:
        trainer = StareTrainer(
            **parts(arguments.steps, directory),
            target_entropy=arguments.target_entropy,
            weights=weights,
        )
        trainer.train()
    for step, row in enumerate(trainer.history, start=1):
        print(f"step {step:3}  " + "  ".join(f"{name} {row[name]:.4g}" for name in row))


if __name__ == "__main__":
    main()
