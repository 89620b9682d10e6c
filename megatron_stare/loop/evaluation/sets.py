"""The problems of evaluation.eval_data:
each file with its settings, repeated rows found and evaluated once.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from megatron_stare.collect.rollout_worker import EVALUATION
from megatron_stare.config import Config, EvaluationSetConfig
from megatron_stare.data.prompts import Tools, check_rewarded, load_prompts
from megatron_stare.data.sources import parts
from megatron_stare.records import Prompt
from megatron_stare.rollout.engine import Request, SamplingParams
from megatron_stare.system import digest, file_digest

# Of a model directory, next to its weights: all that decides what is sampled from them.
_MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class EvaluationSet:
    """`samples` responses of each prompt. `copies[i]` is how many rows prompt i stands for."""

    name: str
    prompts: tuple[Prompt, ...]
    copies: tuple[int, ...]
    samples: int
    params: SamplingParams
    seed: tuple[int, ...]

    def request(self, place: int, number: int) -> Request:
        """The request for response `number` of the prompt at `place`."""
        prompt = self.prompts[place]
        return Request(prompt.token_ids, (*self.seed, place, number), prompt=prompt)

    def fingerprint(self, policy: str) -> str:
        """16 hex digits of everything but `samples` that decides a response."""
        parts = (
            policy,
            self.seed,
            dataclasses.astuple(self.params),
            [p.token_ids.tolist() for p in self.prompts],
        )
        return digest(json.dumps(parts), 16)


def build_sets(
    config: Config, tokenizer: PreTrainedTokenizerBase, tools: Tools = ()
) -> tuple[list[EvaluationSet], list[str]]:
    """All sets by name, and what there is to say about their rows, in lines. UserError:
    a file that cannot be used.

    A set's random numbers hang on run.seed and its name, so that other sets may come and go.
    """
    sets, lines = [], []
    for name, source in sorted(config.evaluation.eval_data.items()):
        parts(source, f"evaluation.eval_data.{name}")
        rows, dropped = load_prompts(source, tokenizer, config.data, tools=tools)
        check_rewarded(config, rows, f"evaluation.eval_data.{name}")
        if dropped.total:
            lines.append(f"{name}: {dropped.total} rows of {source} are not evaluated: {dropped}")
        counts = Counter(map(_problem, rows))
        firsts = {_problem(prompt): prompt for prompt in reversed(rows)}
        prompts = tuple(
            dataclasses.replace(firsts[key], index=place) for place, key in enumerate(counts)
        )
        settings = config.evaluation.per_set.get(name, EvaluationSetConfig())
        params = _params(config, settings)
        asked = _own(settings.n_samples, config.evaluation.n_samples_per_eval_prompt)
        samples = 1 if params.greedy else asked
        if samples < asked:
            lines.append(
                f"{name}: greedy (temperature={params.temperature:g}, top_k={params.top_k}); "
                f"{asked} samples of a problem would be one and the same: each is sampled once"
            )
        if len(prompts) < len(rows):
            lines.append(
                f"{name}: {len(rows)} rows are {len(prompts)} problems, repeated; each is "
                f"evaluated once, with {samples} samples (evaluation.per_set.{name}.n_samples sets "
                "how many)"
            )
        seed = (config.run.seed, EVALUATION, zlib.crc32(name.encode()))
        sets.append(EvaluationSet(name, prompts, tuple(counts.values()), samples, params, seed))
    return sets, lines


def _problem(prompt: Prompt) -> tuple[bytes, str]:
    """The identity of a problem: rows with an equal one are copies."""
    return prompt.token_ids.tobytes(), prompt.label


def policy_name(config: Config, weights: str) -> str:
    """The name of the policy that an evaluation samples: the hash of the weights, what else a model
    directory says about their use (shape, tokenizer, end of a response), the engine, and its tools.
    The step is not part of it: a run that went back and trained on again has other weights under
    the same number, and the same weights may have two numbers.
    """
    directory = Path(config.policy.hf_checkpoint)
    files = {
        name: file_digest(directory / name) for name in _MODEL_FILES if (directory / name).is_file()
    }
    tools = dataclasses.asdict(config.tools) if config.tools.environment else {}
    return json.dumps([weights, files, config.rollout.engine, config.policy.dtype, tools])


def _params(config: Config, settings: EvaluationSetConfig) -> SamplingParams:
    evaluation, rollout = config.evaluation, config.rollout
    return SamplingParams(
        _own(settings.temperature, evaluation.eval_temperature),
        _own(settings.top_p, evaluation.eval_top_p),
        settings.max_response_len
        or evaluation.eval_max_response_len
        or rollout.rollout_max_response_len,
        rollout.skip_special_tokens,
        stop=tuple(rollout.stop),
        top_k=_own(settings.top_k, evaluation.eval_top_k),
    )


def _own[T](setting: T | None, shared: T) -> T:
    """A set's own setting, else the one that all sets share."""
    return shared if setting is None else setting
