"""Held-out problems: avg@k and unbiased pass@k, on whatever engine holds the policy."""

from __future__ import annotations

import contextlib
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from megatron_stare.config import Config, UserError
from megatron_stare.data.prompts import load_prompts
from megatron_stare.loop import sampling
from megatron_stare.loop.judging import build_judge
from megatron_stare.loop.parts import build_engine, load_tokenizer
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.checkpoints import Checkpoints
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Prompt
from megatron_stare.reporting.summary import avg_at_k, pass_at_k
from megatron_stare.rollout.engine import Engine, SamplingParams
from megatron_stare.scoring.judge import Judge


class Evaluator:
    """Every file of evaluation.eval_data, tokenised once. A response is right where its verdict is `correct`."""

    def __init__(
        self, config: Config, tokenizer: PreTrainedTokenizerBase, engine: Engine, judge: Judge, topology: Topology
    ) -> None:
        self.config, self.engine, self.judge, self.topology = config, engine, judge, topology
        self.problems: dict[str, list[Prompt]] = {
            name: load_prompts(path, tokenizer, config.data)[0] for name, path in config.evaluation.eval_data.items()
        }
        settings = config.evaluation
        length = settings.eval_max_response_len or config.rollout.rollout_max_response_len
        self.params = SamplingParams(
            settings.eval_temperature, settings.eval_top_p, length, config.rollout.skip_special_tokens
        )

    def due(self, step: int) -> bool:
        """Whether to evaluate after this step: at the interval, and after the last step of the run."""
        interval = self.config.evaluation.eval_interval
        return interval > 0 and (step % interval == 0 or step == self.config.train.num_rollout)

    def evaluate(self) -> dict[str, float]:
        """eval/<name>/{avg_at_k, pass_at_k, k, response_length, truncated_fraction, unverifiable}. Collective.

        An unverifiable response counts as not right, and `unverifiable` says how many there were.

        The same random numbers serve every evaluation, so that two of them differ by the policy alone.
        """
        metrics: dict[str, float] = {}
        k = self.config.evaluation.n_samples_per_eval_prompt
        for number, (name, prompts) in enumerate(sorted(self.problems.items())):
            seed = (self.config.run.seed, sampling.EVALUATION, number)
            begun = sampling.begin(self.engine, self.judge, prompts, k, self.params, seed, self.topology)
            groups = begun.finish()
            right = [sum(rollout.verdict == "correct" for rollout in group.rollouts) for group in groups]
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            metrics |= {
                f"eval/{name}/avg_at_k": sum(avg_at_k(k, count) for count in right) / len(right),
                f"eval/{name}/pass_at_k": sum(pass_at_k(k, count, k) for count in right) / len(right),
                f"eval/{name}/k": k,
                f"eval/{name}/response_length": sum(len(r.response_ids) for r in rollouts) / len(rollouts),
                f"eval/{name}/unverifiable": float(sum(r.verdict == "unverifiable" for r in rollouts)),
                f"eval/{name}/truncated_fraction": sum(r.status == "truncated" for r in rollouts) / len(rollouts),
            }
        return metrics


def evaluate_checkpoint(config: Config, topology: Topology) -> dict[str, float]:
    """Evaluate the newest checkpoint of run.dir, or policy.hf_checkpoint where the run has none. Collective."""
    if not config.evaluation.eval_data:
        raise UserError("evaluation.eval_data is empty; give evaluation.eval_data.<name>=<file.jsonl or .parquet>")
    judge, tokenizer = build_judge(config), load_tokenizer(config.policy.hf_checkpoint)
    with contextlib.closing(judge), contextlib.closing(build_engine(config, tokenizer, topology)) as engine:
        evaluator = Evaluator(config, tokenizer, engine, judge, topology)
        actor = Actor(config, topology, config.train.num_rollout)
        checkpoints = Checkpoints(actor, Path(config.run.dir) / "checkpoints", config.run)
        newest = checkpoints.find(claim=False)
        step = checkpoints.load(newest)["step"] if newest else 0
        engine.load_weights(actor.weights(), step)
        return {"step": step} | evaluator.evaluate()
