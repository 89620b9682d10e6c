"""The stages that sample: the batch of rollouts, SGLang servers, tools and their sandbox."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ResamplingConfig:
    """Prompts of a batch that are sampled again, with other seeds and at another temperature, so
    that some of these rollouts join it (collect/resampling.py).
    """

    # none | aepo | uec_rl (docs/algorithms.md, "Methods that sample again")
    method: str = "none"
    # of aepo, nats: what the last step's mean surprisal is compared with
    target_entropy: float = 0.5
    # of aepo: at which prompts are sampled again at or below the target
    high_temperature: float = 1.2
    # of aepo: and above it, where half as many rollouts join
    low_temperature: float = 0.8
    # of aepo: of the batch's prompts are sampled again, its first
    prompt_share: float = 0.25
    # of aepo: that join the batch, each in the place of another
    max_rollouts: int = 60
    # what exceeds it is trained: of aepo the advantage of a rollout that joins the batch, of uec_rl
    # the size of that of a prompt's first rollouts
    min_advantage: float = 0.05
    temperature: float = 1.1  # of uec_rl: at which prompts without a right answer are sampled again
    samples: int = 20  # of uec_rl: so many rollouts of each
    min_again: float = 0.5  # of uec_rl: and as min_advantage, of these
    # of uec_rl: batches of its own sampling between two that are made of rollouts put by; 0: none
    replay_interval: int = 5
    replay_batches: int = 2  # of uec_rl: the newest so many batches of rollouts are put by
    replay_advantage: float = 1.0  # of uec_rl: those whose advantage, when trained, was above it
    replay_negative: bool = False  # of uec_rl: or below minus it

    @property
    def replays(self) -> bool:
        """Whether rollouts are put by."""
        return self.method == "uec_rl" and self.replay_interval > 0


@dataclass(frozen=True)
class RolloutConfig:
    engine: str = "embedded"  # embedded (transformers, in the trainer's process) | sglang (servers)
    # on_policy | one_step_off (sample k + 1 while training k) | fully_async
    asynchrony: str = "on_policy"
    rollout_batch_size: int = 64  # prompts (groups) in one optimizer step
    n_samples_per_prompt: int = 8  # rollouts of a group
    # prompts asked for in one generation round; 0: rollout_batch_size
    over_sampling_batch_size: int = 0
    # on_policy: end what is still being sampled once the batch is full
    abort_long_tail: bool = False
    dynamic_sampling: bool = True  # drop groups without signal, and sample again
    # what must differ within a group: accuracy (the verdicts, as DAPO filters) | reward (penalties
    # and weighted parts too)
    dynamic_sampling_metric: str = "accuracy"
    max_generation_rounds: int = 10  # of dynamic sampling, in one step
    # after the last round go on with the groups there are (at least one)
    accept_partial_batch: bool = False
    # a rollout with a token older than this many rollout batches is dropped and counted; -1: 0
    # on-policy, 1 where batches are sampled ahead or the long tail is taken up in the next step
    max_staleness: int = -1
    partial_rollout: bool = True  # and go on with it in the next step; false: sample it again
    rollout_max_response_len: int = 3072  # tokens, those of tools included
    rollout_temperature: float = 1.0  # logits are divided by it, in the trainer as well
    rollout_top_p: float = 1.0  # must stay 1 in training (docs/asynchrony.md)
    resampling: ResamplingConfig = field(default_factory=ResamplingConfig)
    skip_special_tokens: bool = True  # in the text that verifiers see
    engine_batch_size: int = 256  # sequences decoded together by the embedded engine
    # processes on the first node that sample and judge next to the trainer; 0: the trainer's does;
    # -1: 1 where rollouts come from servers, else 0
    workers_per_node: int = -1

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
        return int(self.asynchrony != "on_policy" or self.abort_long_tail)


@dataclass(frozen=True)
class SGLangConfig:
    """SGLang servers (rollout.engine=sglang):
    attached to by `urls`, or launched, kept alive and ended by the run.
    """

    # running servers, e.g. [http://node1:30000]; empty: launch them
    urls: list[str] = field(default_factory=list)
    # a running sglang-router that hands out generation; its workers, or `urls`, get the rest
    router_url: str = ""
    # servers share the trainer's GPUs: they give their memory back while it trains
    colocated: bool = False
    num_servers: int = 1  # servers to launch
    gpus_per_server: int = 1  # over which a launched one splits the model (its --tp-size)
    # number of the first GPU of the first launched server on this machine; the others follow
    first_gpu: int = 0
    # the interpreter that starts one, of an environment with SGLang; empty: SGLANG_PYTHON, else
    # .venv-sglang's without CUDA, and the trainer's with it
    python: str = ""
    # starts one instead; empty: python -m sglang.launch_server, or tools/sglang_cpu/serve without
    # CUDA
    command: str = ""
    server_args: str = ""  # further arguments of each launched server, as on its command line
    host: str = "127.0.0.1"  # the interface that launched servers listen on
    port: int = 0  # of the first of them, the others follow; 0: any that is free
    # sent with every request, and given to launched servers; empty: the environment's
    # SGLANG_API_KEY. Written to no config.yaml
    api_key: str = field(default="", repr=False)
    start_timeout: float = 600.0  # seconds until a launched server must answer
    max_restarts: int = 20  # of dead servers, in one run
    # seconds before the second restart in a row of one server; doubled each time, up to a minute
    restart_backoff: float = 1.0
    # servers sample by the seeds they are sent, whatever is sampled beside: slower
    # (docs/sglang.md, "The same run twice")
    deterministic: bool = False
    max_concurrency: int = 256  # requests in flight on one server
    # seconds for one answer; then the request goes on elsewhere, with the tokens it has
    request_timeout: float = 600.0
    # tokens of one message of an answer that is under way: a time-out or a dead server costs those
    # of the last one; 0: answers come whole
    stream_interval: int = 512
    max_attempts: int = 6  # faulty answers to one request before the run gives up
    health_interval: float = 5.0  # seconds between two looks at a server
    # seconds of silence, three looks in a row, after which a server counts as dead
    health_timeout: float = 60.0
    # broadcast (NCCL, gloo on a CPU) | tensor (HTTP; handles if colocated) | disk | delta (over a
    # slow link: what changed, to `mirrors`)
    sync_method: str = "broadcast"
    sync_bucket_mib: int = 512  # weights sent together; bounds what a sync holds beside the model
    sync_timeout: float = 600.0  # seconds for one bucket
    # of sync_method=disk: a place that every server sees; empty: run.dir/weights. Weights go to a
    # directory of the run's own in it, and nothing else in it is touched
    sync_directory: str = ""
    # of sync_method=delta: `python -m megatron_stare mirror` beside the servers, e.g.
    # [http://site:31000]; one for all servers, or one for each in their order
    mirrors: list[str] = field(default_factory=list)
    # of sync_method=delta: all weights are sent every so many syncs; 0: only where they must be
    full_sync_interval: int = 50
    master_address: str = ""  # where servers reach this trainer; empty: found out
    verify_weights: bool = True  # compare checksums after every sync


@dataclass(frozen=True)
class SandboxConfig:
    """Where Python from a model runs (rollout/sandbox/protections.py
    says what each isolation does not stop).
    """

    # auto (bubblewrap where it works, else limits, but never as root) | bubblewrap | limits (what
    # needs no program)
    isolation: str = "auto"
    # a SandboxFusion server to run the code instead, e.g. http://node1:8080; isolation is then its
    # own
    url: str = ""
    # variables stay over the turns of an episode; false: a fresh interpreter per call
    stateful: bool = False
    # sessions that keep a process between their calls; the one that was idle for longest gives it
    # up, with its variables, for another
    max_sessions: int = 64
    max_concurrency: int = 16  # calls that run at once; further ones wait
    warm_workers: int = 4  # idle interpreters kept ready; 0: every call starts its own
    # the interpreter (3.12 or newer) and with it the packages the code sees; empty: the trainer's
    python: str = ""
    # modules imported before the call, e.g. [numpy,sympy]
    preload: list[str] = field(default_factory=list)
    wall_seconds: float = 10.0  # of one call
    # of one call's process, all its threads; its children have as much each
    cpu_seconds: float = 10.0
    memory_mib: int = 1024  # address space of each process, preloaded modules included
    max_processes: int = 16  # processes and threads at once
    file_mib: int = 16  # one file
    disk_mib: int = 64  # all files together, each 4 KiB at least
    open_files: int = 64  # of each process
    output_bytes: int = 65536  # of stdout, and of stderr; a call that prints more is ended
    # seconds until a started interpreter must answer, preloading included
    start_timeout: float = 60.0
    # requests to `url` for one call, or starts of an interpreter for it, before the run gives up
    max_attempts: int = 4


@dataclass(frozen=True)
class ToolsConfig:
    """Multi-turn rollouts with tools (rollout/tools/engine.py);
    none where `environment` is empty.
    """

    # python (in the sandbox) | calculator | a dotted path package.module.name of your own
    environment: str = ""
    # how the model writes a call: hermes | qwen3_coder | code (rollout/tools/calls.py)
    format: str = "hermes"
    # how a result is written, with {output}, in the same turn; empty: the chat template's tool role
    response: str = ""
    max_turns: int = 8  # of the model
    max_calls: int = 16  # tool calls of an episode
    call_seconds: float = 30.0  # of one call
    episode_seconds: float = 300.0  # of all calls of an episode together
    # of an episode, generation included: no further turn begins after them
    max_seconds: float = 1800.0
    output_characters: int = 8192  # of one result; the rest is cut, with a mark
    # a regular expression: what makes a turn without a call an answer, not void
    answer_pattern: str = r"\\boxed\{"
    # end at a turn with neither call nor answer, and leave the rollout out of the loss
    filter_void_turns: bool = False
