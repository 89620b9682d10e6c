"""The sections about rewards, advantages and a language model as judge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from megatron_stare.config.data import source_of
from megatron_stare.config.section import (
    Count,
    Fraction,
    NonNegative,
    Number,
    Positive,
    Whole,
    section,
)

Script = Literal[
    "latin",
    "han",
    "japanese",
    "hangul",
    "cyrillic",
    "greek",
    "arabic",
    "hebrew",
    "devanagari",
    "thai",
]


PER_SOURCE = "per_source"  # the reward that judges each row by that of its data set


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
