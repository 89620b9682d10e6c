"""The sections about sampling: rollout batches, resampling, and tools."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import Field

from megatron_stare.config.section import (
    Count,
    Integer,
    NonNegative,
    Positive,
    PositiveFraction,
    Whole,
    section,
)


@section
class ResamplingConfig:
    """Sampling some prompts of a batch again with other seeds and another temperature
    (docs/algorithms.md).
    """

    method: Literal["none", "aepo", "uec_rl"] = "none"
    """Method that decides which prompts are resampled and which of the new rollouts are trained."""
    target_entropy: NonNegative = 0.5
    """AEPO: mean surprisal in nats with which that of the last step is compared."""
    high_temperature: Positive = 1.2
    """AEPO: resampling temperature while the mean surprisal is at or below the target."""
    low_temperature: Positive = 0.8
    """AEPO: resampling temperature while the mean surprisal is above the target; half as many
    rollouts then join the batch."""
    prompt_share: PositiveFraction = 0.25
    """AEPO: fraction of the batch's prompts that are resampled, taken from its start."""
    max_rollouts: Count = 60
    """AEPO: maximum number of resampled rollouts in the batch, each replacing another rollout."""
    min_advantage: NonNegative = 0.05
    """Minimum advantage: AEPO keeps a resampled rollout whose advantage is larger, UEC-RL keeps a
    first-round rollout whose |advantage| is larger."""
    temperature: Positive = 1.1
    """UEC-RL: temperature at which prompts without a correct response are resampled."""
    samples: Annotated[Integer, Ge(2)] = 20
    """UEC-RL: number of rollouts of each resampled prompt."""
    min_resampled_advantage: NonNegative = 0.5
    """UEC-RL: minimum |advantage| among a prompt's resampled rollouts for a rollout to be kept."""
    replay_interval: Whole = 5
    """UEC-RL: number of new batches between two batches from the replay buffer; 0 never replays."""
    replay_batches: Count = 2
    """UEC-RL: number of newest batches whose rollouts the replay buffer keeps."""
    replay_advantage: NonNegative = 1.0
    """UEC-RL: minimum advantage of a trained rollout for the replay buffer to keep it."""
    replay_negative: bool = False
    """UEC-RL: also buffer rollouts whose advantage is below -replay_advantage."""

    @property
    def replays(self) -> bool:
        """Whether rollouts are buffered for replay."""
        return self.method == "uec_rl" and self.replay_interval > 0


@section
class RolloutConfig:
    """The rollout batch: its engine, size, filters and age."""

    engine: Literal["embedded", "sglang"] = "embedded"
    """Rollout engine: `embedded` is transformers in the trainer, `sglang` uses SGLang servers."""
    asynchrony: Literal["on_policy", "one_step_off", "fully_async"] = "on_policy"
    """How generation and training overlap: not at all, one batch ahead, or continuously."""
    rollout_batch_size: Count = 64
    """Number of prompts (groups) in one rollout batch."""
    n_samples_per_prompt: Count = 8
    """Number of rollouts of each prompt, the size of a group."""
    over_sampling_batch_size: Whole = 0
    """Number of prompts requested in the first generation round of a step; later rounds request
    what the missing groups need. 0 requests rollout.rollout_batch_size in every round."""
    long_tail: Literal["wait", "continue", "restart", "gather"] = "wait"
    """Treatment of rollouts that are unfinished when the batch is full, in on_policy mode: `wait`
    for them; stop them, and `continue` or `restart` them in the next step; or stop them and
    `gather` their prompts for a step that samples these alone."""
    cache_over_versions: Literal["recomputed", "kept"] = "recomputed"
    """Prefix cache of the requests that are in flight on SGLang servers when new weights come
    (fully_async mode): `recomputed` under the new weights, or `kept`, which saves the prefill and
    samples on a cache of mixed versions (docs/asynchrony.md)."""
    dynamic_sampling: bool = True
    """Drop groups without a learning signal and sample other prompts instead."""
    dynamic_sampling_metric: Literal["accuracy", "reward"] = "accuracy"
    """Values that must differ within a group that carries a signal: the verdicts (as in DAPO), or
    the rewards with penalties and weighted parts."""
    max_generation_rounds: Count = 10
    """Maximum number of generation rounds of dynamic sampling in one step."""
    accept_partial_batch: bool = False
    """Train on an incomplete batch, of at least one group, after the last generation round."""
    max_staleness: Annotated[Integer, Ge(-1)] = -1
    """Maximum age of a rollout's oldest token, in rollout batches; older rollouts are dropped and
    counted. -1 means 0 in on_policy mode with rollout.long_tail=wait or gather, else 1."""
    rollout_max_response_len: Count = 3072
    """Maximum number of tokens in a response, tool output included."""
    rollout_temperature: Positive = 1.0
    """Sampling temperature, by which the trainer divides the logits as well."""
    rollout_top_p: PositiveFraction = 1.0
    """Total probability of the most likely tokens that training rollouts are sampled from; it must
    stay 1 in training (docs/asynchrony.md)."""
    stop: list[str] = Field(default_factory=list)
    """Texts that end a response, or a turn of it, as its end token does, e.g. `[</answer>]`; the
    text stays in the response. Evaluation uses them too."""
    resampling: ResamplingConfig = Field(default_factory=ResamplingConfig)
    """Sampling some prompts of a batch again."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text that verifiers read."""
    engine_batch_size: Count = 256
    """Number of sequences that the embedded engine decodes together."""
    workers_per_node: Annotated[Integer, Ge(-1), Le(64)] = -1
    """Number of processes on the first node that sample and judge next to the trainer; 0 does this
    in the trainer's process, -1 means 1 with SGLang servers, else 0."""

    @property
    def workers(self) -> int:
        """workers_per_node with -1 resolved."""
        if self.workers_per_node >= 0:
            return self.workers_per_node
        return int(self.engine == "sglang")

    @property
    def staleness_limit(self) -> int:
        """max_staleness with -1 resolved [rollout batches]."""
        if self.max_staleness >= 0:
            return self.max_staleness
        one_version = self.long_tail in ("wait", "gather")
        return int(self.asynchrony != "on_policy" or not one_version)

    @property
    def stops_the_tail(self) -> bool:
        """Whether rollouts are stopped when the batch is full."""
        return self.long_tail != "wait"


@section
class ToolsConfig:
    """Multi-turn rollouts with tools (docs/tools.md), which run only if `environment` is set."""

    environment: str = ""
    """Tools of an episode: `python` (in the sandbox), `calculator`, or a class package.module.name;
    empty trains on single turns."""
    format: Literal["hermes", "qwen3_coder", "code"] = "hermes"
    """Syntax in which the model writes a tool call."""
    response: str = ""
    """Text that carries a tool's result within the same turn, with {output} as its place; empty
    uses the tool role of the chat template."""
    max_turns: Count = 8
    """Maximum number of turns of the model in an episode."""
    max_calls: Count = 16
    """Maximum number of tool calls in an episode."""
    call_seconds: Positive = 30.0
    """Time limit of one tool call, in seconds."""
    episode_seconds: Positive = 300.0
    """Time limit of all tool calls of an episode together, in seconds."""
    max_seconds: Positive = 1800.0
    """Seconds, generation included, after which an episode starts no further turn."""
    output_characters: Annotated[Integer, Ge(100)] = 8192
    """Maximum number of characters of one tool result; the rest is cut and marked."""
    answer_pattern: str = r"\\boxed\{"
    """Regular expression of an answer: a turn with neither a call nor a match is void."""
    filter_void_turns: bool = False
    """End the episode at a void turn and exclude the rollout from the loss."""


@section
class AgentsConfig:
    """Agents as programs of yours, which call the policy through an OpenAI-compatible endpoint
    (docs/agents.md). They run only if `function` or `command` is set.
    """

    function: str = ""
    """Agent as a function package.module.name: of a row and an endpoint, it returns the reward."""
    command: list[str] = Field(default_factory=list)
    """Agent as a command with arguments; {base_url}, {api_key} and {model} in it are replaced."""
    python: str = ""
    """Python of the environment that the agent is installed in; empty uses the trainer's."""
    format: Literal["hermes", "qwen3_coder", "code"] = "hermes"
    """Syntax in which the model writes a tool call."""
    hosts: Count = 2
    """Number of host processes that agents run in, for each engine."""
    episodes_per_host: Count = 64
    """Maximum number of episodes that run in one host process at the same time."""
    address: str = "127.0.0.1"
    """Address that the endpoint listens on."""
    port: Annotated[Integer, Ge(0), Le(65535)] = 0
    """Port that the endpoint listens on; 0 chooses a free one."""
    max_calls: Count = 64
    """Maximum number of model calls in an episode."""
    max_tokens: Count = 1000000
    """Number of sampled tokens of an episode after which no further call is answered."""
    max_sequences: Count = 64
    """Maximum number of training sequences of an episode; each rewritten history begins one."""
    max_seconds: Positive = 1800.0
    """Time limit of an episode in seconds, from its start in a host."""
    grace_seconds: Positive = 10.0
    """Seconds that a stopped agent has to end, after which its host process is ended."""
    heartbeat_seconds: Positive = 5.0
    """Seconds between two heartbeats to a client that waits for an answer."""
    tolerate: Literal["none", "format", "format+reasoning"] = "format+reasoning"
    """Differences between what an agent was served and what it gives back that continue the same
    sequence; any other difference begins a new one."""

    @property
    def active(self) -> bool:
        """Whether rollouts are episodes of an agent."""
        return bool(self.function or self.command)
