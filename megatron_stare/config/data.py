"""The sections about data: training prompts and evaluation sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from megatron_stare.config.section import (
    Count,
    Fraction,
    NonNegative,
    Positive,
    PositiveFraction,
    Whole,
    section,
)

DATA_SOURCE = "data_source"  # key of a prompt's metadata: the data set of its row


def source_of(metadata: Mapping[str, Any]) -> str:
    """The data set that a prompt's row is of; empty where the row names none."""
    return str(metadata.get(DATA_SOURCE) or "")


@section
class DataConfig:
    """Training prompts: where they come from and how rows become prompts (docs/data.md)."""

    prompt_data: str = ""
    """Source of the training prompts: a file, a directory, several of them separated by commas,
    `reasoning_gym:NAME?size=500&seed=1`, or a function package.module.name."""
    sources: dict[str, Positive] = Field(default_factory=dict)
    """Sources mixed by weight, e.g. `{a.jsonl: 3, b.parquet: 1}`, instead of data.prompt_data."""
    input_key: str = "prompt"
    """Column that holds the prompt, either as text or as a list of chat messages."""
    label_key: str = "label"
    """Column that holds the reference answer for the verifier."""
    metadata_key: str = "metadata"
    """Column that holds an object for the verifier and the environment."""
    source_key: str = DATA_SOURCE
    """Column, or key of the metadata, that names the data set of a row; scoring.per_source and
    reward functions of verl's form read it."""
    tool_key: str = "tools"
    """Column that holds the schemas of the functions that the row's chat template offers."""
    system_prompt: str = ""
    """System message for rows that have none of their own."""
    wrap_text: bool = False
    """Turn a text prompt into one user message; if false, the text is encoded unchanged."""
    apply_chat_template: bool = True
    """Render prompts that are lists of messages with the tokenizer's chat template."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the tokenizer's chat template, e.g. `{enable_thinking: false}`; for prompts, for
    cold_start.data and for the turns of tools and agents."""
    rollout_max_prompt_len: Count = 1024
    """Maximum number of tokens in a prompt; a longer prompt is handled as data.on_bad_row says."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Treatment of an unusable row: `error` ends the run, `skip` leaves it out and counts it."""
    deduplicate: Literal["none", "exact", "normalised"] = "none"
    """How repeated training prompts are found; the first of equal prompts is kept."""
    drop_evaluation_prompts: bool = False
    """Leave out training prompts that are also in evaluation.eval_data; false only counts them."""
    pass_rates: str = ""
    """File problems.jsonl that `evaluate` has written for the training prompts; a prompt is kept if
    its fraction of correct responses lies in data.min_pass_rate .. data.max_pass_rate. Prompts that
    the file lacks are left out."""
    min_pass_rate: Fraction = 0.0
    """Lowest fraction of correct responses of a prompt that is kept by data.pass_rates."""
    max_pass_rate: Fraction = 1.0
    """Highest fraction of correct responses of a prompt that is kept by data.pass_rates."""
    shuffle: bool = True
    """Shuffle the prompts differently in every epoch; if false, they keep the order of the file."""


@section
class EvaluationSetConfig:
    """Settings of one evaluation set; an unset field takes the value of the whole section."""

    n_samples: Count | None = None
    """Number of responses to each problem of this set."""
    temperature: NonNegative | None = None
    """Sampling temperature for this set; 0 is greedy."""
    top_p: PositiveFraction | None = None
    """Total probability of the most likely tokens that responses of this set are sampled from."""
    top_k: Whole | None = None
    """Number of most likely tokens that responses of this set are sampled from; 0 is unlimited."""
    max_response_len: Count | None = None
    """Maximum number of tokens in a response of this set."""


def _reflection_words() -> list[str]:
    return ["wait", "however", "let me check", "alternatively", "double-check", "recheck", "hmm"]


@section
class EvaluationConfig:
    """Held-out problem sets, and how the policy is sampled on them (docs/evaluation.md)."""

    eval_interval: Whole = 0
    """Number of rollout batches between two evaluations; 0 never evaluates during training."""
    eval_at_start: bool = False
    """Evaluate before the first step too; the numbers are eval_start/<set>/<number> in the line of
    step 1."""
    eval_data: dict[str, str] = Field(default_factory=dict)
    """Sources of evaluation sets by name, as in data.prompt_data, e.g. `{aime24: a.parquet}`."""
    n_samples_per_eval_prompt: Count = 8
    """Number of responses to each problem, the k of avg@k, pass@k and majority@k."""
    eval_temperature: NonNegative = 1.0
    """Sampling temperature of evaluation; 0 is greedy, with one response to each problem."""
    eval_top_p: PositiveFraction = 1.0
    """Total probability of the most likely tokens that evaluation samples from."""
    eval_top_k: Whole = 0
    """Number of most likely tokens that evaluation samples from; 0 is unlimited."""
    eval_max_response_len: Whole = 0
    """Maximum tokens in an evaluation response; 0 uses rollout.rollout_max_response_len."""
    per_set: dict[str, EvaluationSetConfig] = Field(default_factory=dict)
    """Settings of single evaluation sets by name, e.g. `evaluation.per_set.aime24.n_samples=32`."""
    reflection_words: list[str] = Field(default_factory=_reflection_words)
    """Words whose occurrences in responses are counted as signs of reflection, in either case."""
