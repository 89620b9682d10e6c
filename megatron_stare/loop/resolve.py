"""Finds everything that a configuration names, before anything is trained: functions, files, model
directories, tokenizers, tools; and checks that the settings fit the model and one another.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from transformers import (
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from megatron_stare.collect.judging import build_judge
from megatron_stare.collect.resampling import find_method
from megatron_stare.config import Config, MismatchConfig, UserError
from megatron_stare.data.mixture import check_sources, training_stream
from megatron_stare.data.prompts import PromptStream
from megatron_stare.loop.prepare import effective_loss
from megatron_stare.losses import Objective, objective_of
from megatron_stare.losses.rollout_correction import only_masks
from megatron_stare.policy import build
from megatron_stare.policy.conversion import tiktoken
from megatron_stare.policy.huggingface.families import megatron_fields
from megatron_stare.records import Prompt
from megatron_stare.rollout.sandbox.fusion import open_sandbox
from megatron_stare.rollout.sglang.reference import check_servers
from megatron_stare.rollout.tools.builtin import (
    CalculatorEnvironment,
    PythonEnvironment,
    python_environments,
)
from megatron_stare.rollout.tools.calls import Tool
from megatron_stare.rollout.tools.environment import MakeEnvironment, find_environment
from megatron_stare.scoring.advantages import checked_estimator
from megatron_stare.scoring.judge import Judge

_TOKENIZER_FILES = (tiktoken.FAST, "tokenizer.model", "vocab.json")


class Resolved(NamedTuple):
    """The inputs from which a run is built. `lines`: remarks about the data's rows."""

    hf: PretrainedConfig
    objective: Objective
    judge: Judge
    tokenizer: PreTrainedTokenizerBase
    stream: PromptStream
    lines: list[str]


def resolve(config: Config) -> Resolved:
    """Everything that the configuration names, found and read; its user closes the judge.
    UserError with every fault, one a line.
    """
    faults: list[str] = []

    def found[Kind](look: Callable[[], Kind]) -> Kind | None:
        try:
            return look()
        except UserError as error:
            faults.append(str(error))
            return None

    model, tools = config.policy.hf_checkpoint, config.tools.environment
    hf = found(lambda: build.read_hf_config(model))
    if hf:
        found(lambda: check_settings(config, hf.max_position_embeddings))
        found(lambda: check_cache(config, hf))
    found(lambda: _check_distillation(config))
    reference = None
    if place := config.reference:
        reference = found(lambda: build.read_hf_config(place, "policy.ref_hf_checkpoint"))
    if hf and reference:
        found(lambda: _check_updates(config, hf, reference))
    if urls := config.sglang.reference_urls:
        found(lambda: check_servers(urls, config.sglang, config.longest_sequence))
    objective = found(lambda: objective_of(effective_loss(config)))
    if objective:
        found(lambda: check_correction(config.mismatch, objective))
    judge = found(lambda: build_judge(config))
    offered = found(lambda: offered_tools(config)) if tools else ()
    found(lambda: check_sources(config))
    tokenizer = found(lambda: load_tokenizer(model)) if hf else None
    if hf and reference and tokenizer is not None:
        used = min(hf.vocab_size, len(tokenizer))
        found(lambda: check_reference_tokens(config, reference.vocab_size, used, tokenizer))
    drawn = None
    if not faults and tokenizer is not None:
        drawn = found(lambda: training_stream(config, tokenizer, offered or ()))
    if drawn and tools:
        found(lambda: check_environment(config, drawn[0].prompts[0]))
    if faults or not (hf and objective and judge and tokenizer and drawn):
        if judge:
            judge.close()
        raise UserError("\nerror: ".join(dict.fromkeys(faults)))
    return Resolved(hf, objective, judge, tokenizer, *drawn)


def check_ahead(config: Config) -> None:
    """`resolve`, for a run that starts later: after a cold start, or after other runs."""
    resolve(config).judge.close()


_EMBEDDINGS = ("vocab_size", "tie_word_embeddings")


def _check_updates(config: Config, hf: PretrainedConfig, reference: PretrainedConfig) -> None:
    ours, theirs = (
        megatron_fields(one) | {name: getattr(one, name) for name in _EMBEDDINGS}
        for one in (hf, reference)
    )
    other = [name for name in ours if ours[name] != theirs.get(name)]
    interval = config.policy.ref_update_interval
    if interval and other:
        raise UserError(
            f"policy.ref_update_interval={interval} copies the policy into "
            f"policy.ref_hf_checkpoint={config.reference}, another kind of model ({other[0]}: "
            f"{ours[other[0]]} and {theirs.get(other[0])}); choose one like the policy"
        )


def check_reference_tokens(
    config: Config, size: int, used: int, tokenizer: PreTrainedTokenizerBase
) -> None:
    """UserError: the reference model, which has `size` token ids, would read one of the `used` ids
    of the policy as another token. Added tokens may differ, as between a base model and what was
    trained from it.
    """
    directory = config.reference
    remedy = (
        f"choose a model with the tokenizer of policy.hf_checkpoint={config.policy.hf_checkpoint}"
    )
    if size < used:
        raise UserError(
            f"policy.ref_hf_checkpoint={directory} has {size} token ids, and the policy uses "
            f"{used}; {remedy}"
        )
    if not has_tokenizer(directory):
        return
    other = load_tokenizer(directory)
    added = {*tokenizer.get_added_vocab(), *other.get_added_vocab()}
    ours, theirs = tokenizer.get_vocab(), other.get_vocab()
    differing = [one for one in ours if one not in added and theirs.get(one) != ours[one]]
    if differing:
        raise UserError(
            f"policy.ref_hf_checkpoint={directory} has another tokenizer: {len(differing)} tokens "
            f"have other ids, among them {differing[0]!r}; {remedy}"
        )


def _check_distillation(config: Config) -> None:
    loss = config.loss
    if not loss.distillation_coef:
        return
    if not config.policy.ref_hf_checkpoint:
        raise UserError(
            f"loss.distillation_coef={loss.distillation_coef:g} needs a teacher; set "
            "policy.ref_hf_checkpoint to its model directory"
        )
    if config.rollout.dynamic_sampling:
        raise UserError(
            "rollout.dynamic_sampling=true drops groups of equal rewards, from which the policy "
            "can learn by a teacher; set it to false with loss.distillation_coef"
        )


def check_environment(config: Config, prompt: Prompt) -> None:
    """Make the environment of one prompt, and close it. UserError: it cannot be made, or is not an
    environment. Those of this package need no check, and their sandbox has its own.
    """
    name = config.tools.environment
    if "." not in name:
        return
    make, release = environments(config)
    try:
        made: Any = make(prompt)
    except Exception as error:  # a class of the user's may raise anything
        raise UserError(
            f"tools.environment={name} raises {type(error).__name__}: {error} for the first prompt;"
            " correct it, or the row's metadata"
        ) from error
    finally:
        release()
    missing = [part for part in ("tools", "call", "close") if not hasattr(made, part)]
    if missing:
        raise UserError(
            f"tools.environment={name} makes a {type(made).__name__} without "
            f"{', '.join(missing)}; add what docs/tools.md lists"
        )
    with ThreadPoolExecutor(1) as thread:  # a notebook has an event loop in its own thread
        thread.submit(asyncio.run, _closed(made)).result()


async def _closed(environment: Any) -> None:
    await environment.close()


def check_settings(config: Config, context_length: int) -> None:
    """UserError for settings that contradict one another, or a model of this context length."""
    _check_lengths(config, context_length)
    _check_sampling(config)
    _check_advantage(config)
    find_method(config)


def check_cache(config: Config, hf: PretrainedConfig) -> None:
    """Servers keep keys in FP8 without scales, unless a checkpoint has some. A norm of queries and
    keys bounds them; without one they leave FP8's range, and responses become noise.
    """
    words = config.sglang.server_args.replace("=", " ").split()
    in_fp8 = any(
        name == "--kv-cache-dtype" and value.startswith("fp8")
        for name, value in itertools.pairwise(words)
    )
    if in_fp8 and not megatron_fields(hf).get("qk_layernorm"):
        raise UserError(
            f"sglang.server_args={config.sglang.server_args!r}: {hf.model_type} has no norm of "
            "queries and keys, so that keys in FP8 without scales are wrong; leave out "
            "--kv-cache-dtype, and give a server more GPUs (sglang.gpus_per_server)"
        )


def check_correction(mismatch: MismatchConfig, objective: Objective) -> None:
    """UserError: a loss that has the ratio to the rollout policy would get it as a weight too."""
    weighs = mismatch.correction != "none" and not only_masks(mismatch)
    if objective.from_rollout and weighs:
        raise UserError(
            f"mismatch.correction={mismatch.correction} would weigh by the ratio to the rollout "
            f"policy once more, after loss.name={objective.name}; set mismatch.correction=none, or "
            "a mask with mismatch.accepted=one"
        )


def _check_sampling(config: Config) -> None:
    """Engines report log-probs of the whole distribution; a truncated one is another policy, whose
    ratio to the trainer's no correction here knows.
    """
    top_p = config.rollout.rollout_top_p
    if top_p < 1.0:
        raise UserError(
            f"rollout.rollout_top_p={top_p} samples from a truncated distribution, whose "
            "log-probs the loss and its corrections do not have; set rollout_top_p=1.0 "
            "(evaluation.eval_top_p is free)"
        )


def _check_advantage(config: Config) -> None:
    estimator, samples = checked_estimator(config.scoring), config.rollout.n_samples_per_prompt
    if estimator.name == "grpo_passk" and samples < 2:
        raise UserError(
            f"scoring.advantage=grpo_passk compares the best two of a prompt's rollouts, and "
            f"rollout.n_samples_per_prompt={samples}; set it to 2 or more"
        )
    metric = config.rollout.dynamic_sampling_metric
    alone = samples == 1 and not (estimator.greedy and metric == "reward")
    if alone and config.rollout.dynamic_sampling:
        other = " or rollout.dynamic_sampling_metric=reward" if estimator.greedy else ""
        raise UserError(
            f"rollout.dynamic_sampling drops groups whose {metric} does not differ, and with "
            f"rollout.n_samples_per_prompt=1 that is every one; set rollout.dynamic_sampling=false"
            f"{other}, or sample 2 or more"
        )


def _check_lengths(config: Config, context_length: int) -> None:
    prompt, response = config.data.rollout_max_prompt_len, config.rollout.rollout_max_response_len
    limits = {f"the model's max_position_embeddings={context_length}": context_length}
    if config.policy.on_long_sequence == "error":
        budget = config.policy.sequence_budget
        limits[
            f"policy.max_tokens_per_gpu={config.policy.max_tokens_per_gpu} x context_parallel_size"
        ] = budget
    for name, limit in limits.items():
        if prompt + response > limit:
            raise UserError(
                f"data.rollout_max_prompt_len={prompt} + "
                f"rollout.rollout_max_response_len={response} = {prompt + response} exceed {name}; "
                "lower one of the lengths or raise the limit"
            )


def offered_tools(config: Config) -> Sequence[Tool]:
    """The tools of prompts without tools of their own:
    those that every episode of the environment has.

    None where tools differ between episodes, and none for code in a turn, which is not a call that
    a template describes.
    """
    name = config.tools.environment
    if not name or config.tools.format == "code":
        return ()
    own = {"python": PythonEnvironment, "calculator": CalculatorEnvironment}
    found = getattr(own.get(name) or find_environment(name), "tools", ())
    return found if isinstance(found, Sequence) else ()


def environments(config: Config) -> tuple[MakeEnvironment, Callable[[], None]]:
    """The function that makes a prompt's environment, and one that closes their shared parts."""
    name = config.tools.environment
    if name == "python":
        runner = open_sandbox(config.sandbox)
        return python_environments(runner, config.sandbox.stateful), runner.close
    return (CalculatorEnvironment if name == "calculator" else find_environment(name)), lambda: None


def has_tokenizer(directory: str) -> bool:
    """Whether files of a tokenizer are in an HF directory."""
    return any((Path(directory) / name).is_file() for name in _TOKENIZER_FILES)


def load_tokenizer(directory: str) -> PreTrainedTokenizerBase:
    """The tokenizer of an HF directory; UserError where there is none.

    The files are looked for first: transformers makes up an empty tokenizer where they are missing.
    tokenizer.json is loaded as it is: AutoTokenizer takes the class that tokenizer_config.json
    names, and in transformers 5 the class LlamaTokenizer replaces the parts that split text. A
    byte-level tokenizer under this name, as in DeepSeek-R1-Distill-Llama, then loses all spaces.
    """
    if not has_tokenizer(directory):
        if (Path(directory) / tiktoken.RANKS).is_file():
            raise UserError(
                f"{directory}: only Python code of the model reads its {tiktoken.RANKS}, and no "
                "such code runs here; make a tokenizer.json of it: python -m megatron_stare "
                f"convert tiktoken-to-hf {directory} {directory}"
            )
        raise UserError(
            f"{directory}: no tokenizer there; copy tokenizer.json and tokenizer_config.json to it"
        )
    fast = (Path(directory) / tiktoken.FAST).is_file()
    reader = PreTrainedTokenizerFast if fast else AutoTokenizer
    try:
        return reader.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(
            f"{directory}: no usable tokenizer ({first}); copy tokenizer.json and its config there"
        ) from None
