"""The sections about sampling: rollout batches, tools, agents, SGLang servers, the sandbox."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import Field

from megatron_stare.config.section import (
    Count,
    Integer,
    NonNegative,
    Number,
    Positive,
    PositiveFraction,
    Whole,
    section,
)

MEMORY_SHARE = "--mem-fraction-static"  # a server's argument
# The variable with that part of a GPU's memory which the plan leaves colocated servers. A run keeps
# its configuration, which therefore has no figure of one machine.
SHARE_VARIABLE = "MEGATRON_STARE_SERVER_SHARE"


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
    """Seconds since the end of an episode's first turn after which it starts no further turn,
    generation included. The first turn, which may wait long for a server, does not count."""
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
    """Number of host processes that agents run in, on each rank that sends requests: all ranks of
    the embedded engine, or rank 0."""
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


@section
class SGLangConfig:
    """SGLang servers for rollout.engine=sglang: running ones named by `urls`, or servers that the
    run starts, watches and ends (docs/sglang.md).
    """

    urls: list[str] = Field(default_factory=list)
    """Addresses of running servers, e.g. `[http://node1:30000]`; empty starts servers."""
    reference_urls: list[str] = Field(default_factory=list)
    """Addresses of running servers of the reference policy or teacher, which read the rollouts
    instead of a copy in the trainer (docs/distillation.md)."""
    router_url: str = ""
    """Address of a running sglang-router that distributes generation requests; other requests go to
    its workers, or to sglang.urls."""
    colocated: bool = False
    """Run the servers on the trainer's GPUs; they release their memory while the trainer works."""
    num_servers: Count = 1
    """Number of servers that the run starts."""
    gpus_per_server: Count = 1
    """Number of GPUs over which a started server splits the model (its --tp-size)."""
    first_gpu: Whole | None = None
    """Number of the first GPU of the first started server; later servers use the next GPUs. Unset
    is the GPU after those that train here, or 0 for colocated servers and the command `serve`."""
    python: str = ""
    """Python interpreter with SGLang that starts a server; empty uses SGLANG_PYTHON, else the
    trainer's interpreter on CUDA and that of .venv-sglang on a CPU."""
    command: str = ""
    """Complete command that starts a server, used instead of sglang.python; empty is
    `python -m sglang.launch_server` on CUDA and tools/sglang_cpu/serve on a CPU."""
    server_args: str = ""
    """Further command-line arguments of each started server."""
    host: str = "127.0.0.1"
    """Network interface on which started servers listen."""
    port: Annotated[Integer, Ge(0), Le(65535)] = 0
    """Port of the first started server; later servers use the next ports; 0 picks free ports."""
    api_key: str = Field(default="", repr=False)
    """Key that is sent with every request and given to started servers; empty uses SGLANG_API_KEY.
    It is never written to config.yaml."""
    start_timeout: Positive = 600.0
    """Seconds without a new line in the log of a starting server after which the start has failed,
    at the latest after ten times as long; a running server of sglang.urls must answer within it."""
    max_restarts: Whole = 20
    """Maximum number of restarts of dead servers in one run."""
    restart_backoff: Annotated[Number, Ge(0), Le(60)] = 1.0
    """Seconds before a server's second restart in a row, doubled each time, up to one minute."""
    deterministic: bool = False
    """Let servers sample by each request's seed alone, which is slower (docs/sglang.md)."""
    speculation: Literal["none", "ngram"] = "none"
    """Let GPU servers draft tokens by n-grams and verify several at once (docs/speculation.md)."""
    draft_tokens: Count = 4
    """Number of tokens that a server drafts in one decoding step with sglang.speculation=ngram."""
    max_concurrency: Count = 256
    """Maximum number of concurrent requests to one server."""
    request_timeout: Positive = 600.0
    """Seconds since the last streamed part of an answer after which the request is ended and
    continued from the tokens received so far, on the same server if it has room."""
    queue_timeout: Positive = 3600.0
    """Seconds within which the first part of an answer must come, the wait in the server's queue
    included; without streaming, the whole answer."""
    stream_interval: Whole = 512
    """Number of tokens in each streamed part of an answer, the most that a time-out or a dead
    server can cost; 0 sends answers whole."""
    max_attempts: Count = 6
    """Number of failed answers to one request after which the run ends."""
    health_interval: Positive = 5.0
    """Seconds between two health checks of a server."""
    health_timeout: Positive = 60.0
    """Seconds of silence, over three or more health checks, after which a server counts as dead."""
    weights: Literal["policy", "fp8", "fp8_uncorrected"] = "policy"
    """Number format of the servers' weights: that of the policy, or E4M3 blocks of 128 x 128
    (docs/fp8_servers.md); `fp8_uncorrected` allows fp8 without a mismatch correction."""
    sync_method: Literal["broadcast", "tensor", "disk", "delta"] | None = None
    """Transport of new weights: `broadcast` over NCCL (gloo on a CPU), `tensor` over HTTP or as
    memory handles if colocated, `disk` through files, `delta` sends only changes to weight relays;
    unset uses `tensor` for colocated servers, else `broadcast`."""
    sync_bucket_mib: Count = 512
    """Size in MiB of the buckets of a weight sync, which bounds its extra memory."""
    sync_timeout: Positive = 600.0
    """Seconds within which one bucket of weights must arrive."""
    sync_directory: str = ""
    """Directory that all servers can read, for sglang.sync_method=disk; empty is run.dir/weights.
    The run only touches a subdirectory of its own."""
    relays: list[str] = Field(default_factory=list)
    """Addresses of weight relays (`python -m megatron_stare relay`) for sglang.sync_method=delta,
    e.g. `[http://site:31000]`: one for all servers, or one for each in order."""
    full_sync_interval: Whole = 50
    """Number of delta syncs after which all weights are sent; 0 sends them only when required."""
    master_address: str = ""
    """Address at which servers reach this trainer; empty detects it."""
    verify_weights: bool = True
    """Compare checksums of the weights after every weight sync."""

    @property
    def transport(self) -> str:
        """sglang.sync_method, or what it is where it is unset."""
        return self.sync_method or ("tensor" if self.colocated else "broadcast")


@section
class SandboxConfig:
    """The sandbox in which Python code from the model runs (docs/tools.md)."""

    isolation: Literal["auto", "bubblewrap", "limits"] = "auto"
    """Protection around the code: `bubblewrap` (namespaces), `limits` (needs no program), or
    `auto`, which is bubblewrap if it works, else limits, but never as root."""
    url: str = ""
    """Address of a SandboxFusion server that runs the code instead, with its own isolation."""
    stateful: bool = False
    """Keep variables over the turns of an episode; if false, each call gets a new interpreter."""
    max_sessions: Count = 64
    """Maximum number of sessions that keep a process between calls; beyond it, the session idle for
    longest loses its process and variables."""
    max_concurrency: Count = 16
    """Maximum number of calls that run at once; further calls wait."""
    warm_workers: Whole = 4
    """Number of idle interpreters kept ready; 0 starts one for every call."""
    python: str = ""
    """Python (3.12 or newer) whose packages the code can import; empty uses the trainer's."""
    preload: list[str] = Field(default_factory=list)
    """Modules that an interpreter imports before the call, e.g. `[numpy, sympy]`."""
    wall_seconds: Positive = 10.0
    """Time limit of one call, in seconds."""
    cpu_seconds: Positive = 10.0
    """CPU time limit of each process of a call, in seconds, over all its threads."""
    memory_mib: Annotated[Integer, Ge(64)] = 1024
    """Address space of each process in MiB, preloaded modules included."""
    max_processes: Count = 16
    """Maximum number of processes and threads at once."""
    file_mib: Count = 16
    """Maximum size of one file, in MiB."""
    disk_mib: Count = 64
    """Maximum size of all files together, in MiB; each file counts at least 4 KiB."""
    open_files: Annotated[Integer, Ge(16)] = 64
    """Maximum number of open files in each process."""
    output_bytes: Count = 65536
    """Maximum number of bytes on stdout, and on stderr; a call that prints more is ended."""
    start_timeout: Positive = 60.0
    """Seconds within which a started interpreter must answer, preloading included."""
    max_attempts: Count = 4
    """Number of failed requests to sandbox.url, or failed interpreter starts, for one call after
    which the run ends."""
