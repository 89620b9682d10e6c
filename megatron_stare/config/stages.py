"""One frozen dataclass per stage of a run.

Field names are the ones the field already uses: slime's for rollouts, Megatron's for parallelism
and optimisation, the STARE reference's for STARE. A recipe (`recipes/`) is a function returning a
Config.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RunConfig:
    dir: str = "runs/latest"
    seed: int = 0
    save_interval: int = (
        50  # optimizer steps between checkpoints; 0: only at the end and on a signal
    )
    keep_last: int = 2  # checkpoints kept
    keep_every: int = 0  # and every checkpoint whose step is a multiple of this; 0: none
    async_save: bool = False  # write checkpoints while training goes on, from a copy in host memory
    tensorboard: bool = False


@dataclass(frozen=True)
class DataConfig:
    # one source: file or directory, several by commas, or package.module.function (sources.py)
    prompt_data: str = ""
    sources: dict[str, float] = field(
        default_factory=dict
    )  # a mixture instead: {source: weight, ...} (mixture.py)
    input_key: str = "prompt"
    label_key: str = "label"
    metadata_key: str = "metadata"
    tool_key: str = "tools"  # schemas of the functions that a row's chat template offers
    system_prompt: str = ""  # for rows without a system message of their own
    wrap_text: bool = (
        False  # a prompt of text becomes a user message; false: it is encoded as it stands
    )
    apply_chat_template: bool = True  # where the prompt is a list of messages
    rollout_max_prompt_len: int = (
        1024  # a longer prompt is an error, or skipped and counted by on_bad_row
    )
    on_bad_row: str = "error"  # error | skip
    deduplicate: str = (
        "none"  # none | exact | normalised: of training prompts that ask the same, keep the first
    )
    drop_evaluation_prompts: bool = (
        False  # leave out problems of evaluation.eval_data; false: say how many there are
    )
    shuffle: bool = True


@dataclass(frozen=True)
class PolicyConfig:
    ref_hf_checkpoint: str = ""  # the KL term's reference; empty: hf_checkpoint
    hf_checkpoint: str = (
        ""  # config.json, tokenizer and weights: *.safetensors, or what `convert` made of them
    )
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int = (
        1  # model chunks per pipeline stage (interleaved schedule)
    )
    num_layers_in_first_pipeline_stage: int = 0  # uneven stages; 0: equal
    num_layers_in_last_pipeline_stage: int = 0
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1  # ranks over which a layer's experts are dealt out
    expert_tensor_parallel_size: int = (
        0  # ranks over which one expert is split; 0: tensor_model_parallel_size
    )
    sequence_parallel: bool = False
    use_distributed_optimizer: bool = False
    recompute_granularity: str = "none"  # none | selective (core attention) | full (every layer)
    dtype: str = "fp32"  # fp32 | bf16
    fp8: str = "none"  # none | e4m3 | hybrid: TransformerEngine's fp8 matrix products, with bf16
    max_tokens_per_gpu: int = 16384  # hard bound on the tokens of one micro-batch, padding included
    on_long_sequence: str = (
        "error"  # error | own_micro_batch: a sequence over max_tokens_per_gpu; never cut
    )
    packed_sequences: bool = (
        True  # sequences end to end; false: right-padded (quicker for many short ones on a CPU)
    )
    head: str = (
        "fused"  # fused | recompute | logits: how the vocabulary projection is run (policy/head.py)
    )
    head_workspace_mib: int = 64  # logits of one chunk of rows, in the fused and recompute heads


@dataclass(frozen=True)
class OptimizerConfig:
    lr: float = 1e-6
    min_lr: float = 0.0
    lr_decay_style: str = "constant"  # constant | linear | cosine
    lr_decay_iters: int = 0  # 0: all steps of the run
    lr_warmup_iters: int = 0
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    adam_eps: float = 1e-8
    clip_grad: float = 1.0


@dataclass(frozen=True)
class RolloutConfig:
    engine: str = "embedded"  # embedded (transformers, in the trainer's process) | sglang (servers)
    asynchrony: str = (
        "on_policy"  # on_policy | one_step_off (sample k + 1 while training k) | fully_async
    )
    rollout_batch_size: int = 64  # prompts (groups) in one optimizer step
    n_samples_per_prompt: int = 8
    over_sampling_batch_size: int = (
        0  # prompts asked for in one generation round; 0: rollout_batch_size
    )
    abort_long_tail: bool = (
        False  # on_policy: end what is still being sampled once the batch is full
    )
    partial_rollout: bool = True  # and go on with it in the next step; false: sample it anew
    rollout_max_response_len: int = 3072
    rollout_temperature: float = 1.0
    rollout_top_p: float = 1.0
    skip_special_tokens: bool = True  # in the text that verifiers see
    engine_batch_size: int = 256  # sequences decoded together by the embedded engine


@dataclass(frozen=True)
class SGLangConfig:
    """SGLang servers (rollout.engine=sglang):
    attached to by `urls`, or launched, kept alive and ended by the run.
    """

    urls: list[str] = field(
        default_factory=list
    )  # running servers, e.g. [http://node1:30000]; empty: launch them
    # a running sglang-router that hands out generation; its workers, or `urls`, get the rest
    router_url: str = ""
    colocated: bool = (
        False  # servers share the trainer's GPUs: they give their memory back while it trains
    )
    num_servers: int = 1  # servers to launch
    # starts one; empty: tools/sglang_cpu/serve without CUDA, else python -m sglang.launch_server
    command: str = ""
    server_args: str = ""  # further arguments of each launched server, as on its command line
    host: str = "127.0.0.1"  # the interface that launched servers listen on
    port: int = 0  # of the first of them, the others follow; 0: any that is free
    start_timeout: float = 600.0  # seconds until a launched server must answer
    max_restarts: int = 20  # of dead servers, in one run
    max_concurrency: int = 256  # requests in flight on one server
    request_timeout: float = 600.0  # seconds for one answer; then it is asked for again elsewhere
    max_attempts: int = 6  # faulty answers to one request before the run gives up
    health_interval: float = 5.0  # seconds between two looks at a server
    health_timeout: float = (
        60.0  # seconds of silence, three looks in a row, after which a server counts as dead
    )
    sync_method: str = (
        "broadcast"  # broadcast (NCCL, gloo on a CPU) | tensor (HTTP; handles if colocated) | disk
    )
    sync_bucket_mib: int = 512  # weights sent together; bounds what a sync holds beside the model
    sync_timeout: float = 600.0  # seconds for one bucket
    sync_directory: str = (
        ""  # of sync_method=disk: a place that every server sees; empty: run.dir/weights
    )
    master_address: str = ""  # where servers reach this trainer; empty: found out
    verify_weights: bool = True  # compare checksums after every sync


@dataclass(frozen=True)
class SandboxConfig:
    """Where Python from a model runs (rollout/sandbox/sandbox.py
    says what each isolation does not stop).
    """

    isolation: str = (
        "auto"  # auto (bubblewrap where it works) | bubblewrap | limits (what needs no program)
    )
    # a SandboxFusion server to run the code instead, e.g. http://node1:8080; isolation is then its
    # own
    url: str = ""
    stateful: bool = (
        False  # variables stay over the turns of an episode; false: a fresh interpreter per call
    )
    max_concurrency: int = 16  # calls that run at once; further ones wait
    warm_workers: int = 4  # idle interpreters kept ready; 0: every call starts its own
    # the interpreter (3.12 or newer) and with it the packages the code sees; empty: the trainer's
    python: str = ""
    preload: list[str] = field(
        default_factory=list
    )  # modules imported before the call, e.g. [numpy,sympy]
    wall_seconds: float = 10.0  # of one call
    cpu_seconds: float = (
        10.0  # of one call's process, all its threads; its children have as much each
    )
    memory_mib: int = 1024  # address space of each process, preloaded modules included
    max_processes: int = 16  # processes and threads at once
    file_mib: int = 16  # one file
    disk_mib: int = 64  # all files together
    open_files: int = 64  # of each process
    output_bytes: int = 65536  # of stdout, and of stderr; a call that prints more is ended
    start_timeout: float = (
        60.0  # seconds until a started interpreter must answer, preloading included
    )
    max_attempts: int = 4  # requests to `url` for one call, before the run gives up


@dataclass(frozen=True)
class ToolsConfig:
    """Multi-turn rollouts with tools (rollout/tools/engine.py);
    none where `environment` is empty.
    """

    environment: str = (
        ""  # python (in the sandbox) | calculator | a dotted path package.module.name of your own
    )
    # how the model writes a call: hermes | qwen3_coder | code (rollout/tools/calls.py)
    format: str = "hermes"
    # how a result is written, with {output}, in the same turn; empty: the chat template's tool role
    response: str = ""
    max_turns: int = 8  # of the model
    max_calls: int = 16  # tool calls of an episode
    call_seconds: float = 30.0  # of one call
    episode_seconds: float = 300.0  # of all calls of an episode together
    max_seconds: float = (
        1800.0  # of an episode, generation included: no further turn begins after them
    )
    output_characters: int = 8192  # of one result; the rest is cut, with a mark
    answer_pattern: str = (
        r"\\boxed\{"  # a regular expression: what makes a turn without a call an answer, not void
    )
    filter_void_turns: bool = (
        False  # end at a turn with neither call nor answer, and leave the rollout out of the loss
    )


@dataclass(frozen=True)
class ScoringConfig:
    # a name in scoring/rewards.py, or a dotted path package.module.function; it says what is right
    reward: str = "math"
    rewards: dict[str, float] = field(
        default_factory=dict
    )  # weights of a sum, e.g. {math: 1, format: 0.1}; empty: reward
    extraction: str = (
        "any"  # of math and multiple_choice: boxed | answer ("Answer:" line) | tag | any
    )
    answer_tag: str = "answer"  # of extraction=tag: <answer>...</answer>
    numeric_tolerance: float = (
        1e-6  # relative, where one of two numbers is a decimal; exact numbers are compared exactly
    )
    format_pattern: str = (
        ""  # of the reward `format`: a regular expression to be found in the response
    )
    language: str = (
        "latin"  # of the reward `language`: the expected script, a name in scoring/verifiers.py
    )
    overlong_buffer_len: int = (
        0  # DAPO's soft penalty over the last so many tokens before the limit; 0: off
    )
    overlong_penalty_factor: float = 1.0  # its size at the limit
    overlong_filter: bool = False  # mask truncated responses out of the loss
    remote_url: str = ""  # of the reward `remote`: a reward model behind HTTP (scoring/remote.py)
    remote_timeout: float = 60.0  # seconds for one of its answers
    remote_attempts: int = 4  # faulty answers to one request before its response is unverifiable
    remote_concurrency: int = 32  # requests in flight
    verifier_processes: int = (
        0  # on each rank; 0: the machine's cores divided by its ranks, at most 16
    )
    verifier_timeout: float = (
        5.0  # seconds for one response, then its process is killed; tried twice
    )
    verifier_memory_mib: int = 4096  # address space of one verifier process; 0: no limit
    normalize_by_std: bool = True  # false: Dr.GRPO's advantage
    dynamic_sampling: bool = True  # drop groups whose rewards are all equal, and sample again
    max_generation_rounds: int = 10
    accept_partial_batch: bool = (
        False  # after the last round go on with the groups there are (at least one)
    )
    max_staleness: int = (
        1  # rollouts with a token older than this many optimizer steps are dropped and counted
    )


@dataclass(frozen=True)
class LossConfig:
    name: str = "stare"
    eps_clip: float = 0.2
    eps_clip_high: float = 0.28
    eps_clip_c: float = 10.0  # dual clip; 0: off
    aggregation: str = "token-mean"  # token-mean | seq-mean-token-mean | seq-mean-token-sum
    kl_loss_coef: float = (
        0.0  # times the KL to policy.ref_hf_checkpoint, added to every token's loss
    )
    kl_loss_type: str = "k3"  # k1 | abs | k2 | k3 | low_var_kl
    variant: str = "O1"  # O1 | C2
    top_p_ratio: float = 0.1
    reweight_w: float = 1.1
    reweight_m: float = 0.9
    target_entropy: float = 0.3  # nats per token
    gate: bool = True
    adaptive: bool = False
    alpha: float = 0.01
    w_max: float = 1.5
    m_min: float = 0.5
    scope: str = "global"  # global | microbatch | sequence
    sensitivity_metrics: bool = True  # entropy sensitivity per quadrant, and the critical weight W*


@dataclass(frozen=True)
class MismatchConfig:
    """Where the rollout policy is another than the trainer's: kernels, precision, staleness."""

    # Where the loss's ratio starts. trainer: at the trainer's log-probs, at 1. rollout: at the
    # engine's, no correction. auto: rollout where rollout.asynchrony makes every batch stale and no
    # correction is set, else trainer.
    old_policy: str = "auto"
    correction: str = (
        "none"  # token_tis | sequence_tis | token_mis | sequence_mis | icepop | geo_rs
    )
    lower: float = 0.0  # bounds of the ratio; 0: the method's own (losses/rollout_correction.py)
    upper: float = 0.0
    normalize: bool = False  # scale the weights to mean 1
    alarm: float = (
        0.0  # nats: mean |ln pi_trainer - ln pi_rollout| of a batch that raises the alarm; 0: never
    )
    on_alarm: str = "stop"  # stop | mask (tokens that differ by more than `alarm` do not count)


@dataclass(frozen=True)
class TrainConfig:
    num_rollout: int = 1000  # rollout batches of the run; each is one line of metrics.jsonl
    updates_per_rollout: int = 1  # mini-batches of whole groups, one optimizer step each
    epochs: int = 1  # passes over a rollout batch
    replan: bool = (
        True  # score again and plan anew before every further update; false: the first plan stays
    )


@dataclass(frozen=True)
class EvaluationSetConfig:
    """One set's own settings; 0: those of EvaluationConfig."""

    n_samples: int = 0
    temperature: float = 0.0
    top_p: float = 0.0
    max_response_len: int = 0


@dataclass(frozen=True)
class EvaluationConfig:
    eval_interval: int = 0  # 0: never during training
    eval_data: dict[str, str] = field(default_factory=dict)  # name -> source, as data.prompt_data
    n_samples_per_eval_prompt: int = 8
    eval_temperature: float = 1.0
    eval_top_p: float = 1.0
    eval_max_response_len: int = 0  # 0: rollout_max_response_len
    per_set: dict[str, EvaluationSetConfig] = field(
        default_factory=dict
    )  # e.g. per_set.aime24.n_samples=32
    reflection_words: list[str] = field(
        default_factory=lambda: [
            "wait",
            "however",
            "let me check",
            "alternatively",
            "double-check",
            "recheck",
            "hmm",
        ]
    )  # counted in responses, in either case


@dataclass(frozen=True)
class ColdStartConfig:
    """Supervised steps before RL; none where `data` is empty.

    Rows of {"messages": [...], "tools": [...]} (loss on the assistant's tokens) or of {"prompt",
    "response"} as text.
    """

    data: str = ""
    steps: int = 0
    batch_size: int = 128
    lr: float = 5e-3
    min_lr_ratio: float = 0.05
    weight_decay: float = 0.01


@dataclass(frozen=True)
class CompareConfig:
    """Several runs from one start. `arms` maps an arm's name to its overrides;
    no arms: one ordinary run.
    """

    world: str = (
        ""  # mirror_grid | calculator: make a quickstart's data and model under run.dir first
    )
    arms: dict[str, list[str]] = field(default_factory=dict)
    run: list[str] = field(default_factory=list)  # which arms; empty: all
    seeds: list[int] = field(default_factory=list)  # empty: run.seed


@dataclass(frozen=True)
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sglang: SGLangConfig = field(default_factory=SGLangConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    mismatch: MismatchConfig = field(default_factory=MismatchConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    cold_start: ColdStartConfig = field(default_factory=ColdStartConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)
