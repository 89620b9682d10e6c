"""The sections about the task: training prompts, evaluation sets, rewards, a model as judge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from megatron_stare.config.section import (
    Count,
    Fraction,
    NonNegative,
    Number,
    Positive,
    PositiveFraction,
    Whole,
    section,
)

DATA_SOURCE = "data_source"  # key of a prompt's metadata: the data set of its row
PER_SOURCE = "per_source"  # the reward that judges each row by that of its data set
Script = Literal[
    "latin", "han", "japanese", "hangul", "cyrillic", "greek", "arabic", "hebrew", "devanagari",
    "thai",
]  # fmt: skip


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


@section
class ScoringConfig:
    """The reward and advantage of a response (docs/rewards.md)."""

    reward: str = "math"
    """Reward that decides correctness: a built-in name, or a function package.module.name."""
    shaping: Literal["none", "signed", "retool"] = "none"
    """How the reward is reshaped: `signed` gives 1 for correct and -1 for wrong; `retool` adds 0.1
    to a wrong response for each round with a tool, up to -0.6."""
    rewards: dict[str, Number] = Field(default_factory=dict)
    """Weights of summed rewards, e.g. `{math: 1, format: 0.1}`; empty uses scoring.reward alone."""
    per_source: dict[str, str] = Field(default_factory=dict)
    """Rewards by data.source_key, for the reward per_source, e.g. `{dapo: math, taco: code}`."""
    extraction: Literal["boxed", "answer", "tag", "any"] = "any"
    """Where math, multiple_choice and reasoning_gym look for the answer: in \\boxed{}, on an
    "Answer:" line, in a tag, or in any of these."""
    answer_tag: str = "answer"
    """Name of the tag around the answer, for scoring.extraction=tag, as in <answer>...</answer>."""
    numeric_tolerance: Fraction = 1e-6
    """Relative difference up to which two numbers are equal, if one is a decimal and the label is
    not an integer."""
    require_evaluated: Literal["auto", "always", "never"] = "auto"
    """Whether the reward math rejects an answer that still has to be computed, such as 3 + 4;
    `auto` rejects it if the label is a number."""
    format_pattern: str = ""
    """Regular expression that the reward format searches for in the response."""
    language: Script = "latin"
    """Script in which the reward language expects the response to be written."""
    overlong_buffer_len: Whole = 0
    """Tokens before the length limit over which DAPO's soft penalty grows; 0 turns it off."""
    overlong_penalty_factor: NonNegative = 1.0
    """Size of DAPO's soft penalty at the length limit."""
    overlong_filter: bool = False
    """Exclude truncated responses from the loss."""
    remote_url: str = ""
    """URL of the HTTP reward model that the reward remote asks."""
    remote_timeout: Positive = 60.0
    """Seconds to wait for one answer of the HTTP reward model."""
    remote_attempts: Count = 4
    """Number of failed requests to the HTTP reward model that make a response unverifiable."""
    remote_concurrency: Count = 32
    """Maximum number of concurrent requests to the HTTP reward model."""
    verifier_processes: Whole = 0
    """Number of verifier processes on each rank; 0 is the machine's cores per rank, at most 16."""
    verifier_timeout: Positive = 5.0
    """Seconds to judge one response before its verifier process is killed; a second try follows
    unless evaluating the response itself took the time, which makes it wrong."""
    function_timeout: NonNegative = 20.0
    """Seconds for a reward function of yours to judge one response, times the number of responses
    if it judges a group; after two failed tries they are unverifiable. 0 calls the function in the
    trainer's process, without a limit."""
    code_seconds: Positive = 60.0
    """Seconds for all tests of one program in the reward code; tests that do not finish fail."""
    code_output_bytes: Whole = 8388608
    """Maximum bytes that one test may print in the reward code; 0 uses sandbox.output_bytes."""
    code_partial_credit: bool = True
    """Let the reward code be the fraction of tests passed; if false, it is 1 if all tests pass,
    else 0, and testing ends at the first failure."""
    verifier_memory_mib: Whole = 4096
    """Address space of one verifier process in MiB; 0 sets no limit."""
    advantage: str = "grpo"
    """Estimator that turns the rewards of a group into advantages: grpo, dr_grpo, rloo, opo,
    reinforce_plus_plus, reinforce_plus_plus_baseline, gpg, grpo_passk, hapo, dcpo, w_reinf, psr,
    nsr, qae, remax, or a function package.module.name."""
    advantage_settings: dict[str, Number] = Field(default_factory=dict)
    """Settings of the advantage estimator, e.g. `{positive: 0.1}` for w_reinf."""
    normalize_by_std: bool = True
    """Divide advantages by the rewards' standard deviation, in grpo, grpo_passk and hapo."""

    @property
    def names(self) -> list[str]:
        """All rewards that may judge a response."""
        summed = list(self.rewards or [self.reward])
        of_sources = self.per_source.values() if PER_SOURCE in summed else ()
        return list(dict.fromkeys([*summed, *of_sources]))

    def deciding(self, metadata: Mapping[str, Any]) -> str:
        """The reward that says whether a response to a row with this metadata is correct; empty: no
        reward does.
        """
        if self.reward != PER_SOURCE:
            return self.reward
        return self.per_source.get(source_of(metadata), "")


@section
class JudgeConfig:
    """The language model that the reward judge asks (docs/judges.md): a running server named by
    `urls`, or SGLang servers that the run starts from `checkpoint`.
    """

    urls: list[str] = Field(default_factory=list)
    """Addresses of OpenAI-compatible servers up to and including /v1, e.g. `[http://node1:30000/v1]`;
    questions are distributed over them."""
    checkpoint: str = ""
    """Hugging Face directory of the judge's model, from which the run starts SGLang servers of its
    own; they never receive the policy's weights."""
    num_servers: Count = 1
    """Number of servers that the run starts from judge.checkpoint."""
    server_args: str = ""
    """Further command-line arguments of each started server, e.g. `--tp-size 2 --base-gpu-id 6`."""
    model: str = "default"
    """Name of the model in each request."""
    key_variable: str = "JUDGE_API_KEY"
    """Environment variable with the API key; without the variable no key is sent."""
    kind: Literal["score", "reference", "rubric", "pairwise"] = "score"
    """Kind of question: a score, whether the answer equals the label, criteria, or which of two
    responses to a prompt is better."""
    template: str = ""
    """File with the question, in which {prompt}, {response}, {reference}, {criteria}, {scale},
    {first} and {second} are replaced; empty uses a built-in text."""
    rubric: str = ""
    """JSON file with the criteria of judge.kind=rubric; empty reads the row's metadata.rubric."""
    rubric_calls: Literal["one", "each"] = "one"
    """Ask for all criteria of a rubric in one question, or for each in one of its own."""
    scale: Count = 10
    """Highest score of judge.kind=score; the reward is the score divided by it."""
    opponents: Count = 8
    """Number of other responses that each response is compared with in judge.kind=pairwise; up to 8
    different responses are all compared."""
    max_tokens: Count = 2048
    """Maximum number of tokens of the judge's answer, thinking included."""
    temperature: NonNegative = 0.0
    """Sampling temperature of the judge."""
    timeout: Positive = 120.0
    """Seconds to wait for one answer of the judge."""
    group_timeout: Positive = 600.0
    """Seconds to judge all responses to one prompt; those not judged by then are unverifiable."""
    attempts: Count = 4
    """Number of failed requests for one answer after which the response is unverifiable."""
    concurrency: Count = 64
    """Maximum number of concurrent requests to the judge, for each process that asks."""
