"""One frozen dataclass per stage of a run.

Field names are the ones the field already uses: slime's for rollouts, Megatron's for parallelism
and optimisation, the STARE reference's for STARE. A recipe (`recipes/`) is a function returning a
Config.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_stare.config.rollouts import (
    RolloutConfig,
    SandboxConfig,
    SGLangConfig,
    ToolsConfig,
)
from megatron_stare.config.training import (
    ColdStartConfig,
    LossConfig,
    MismatchConfig,
    OptimizerConfig,
    PolicyConfig,
    TrainConfig,
)


@dataclass(frozen=True)
class RunConfig:
    dir: str = "runs/latest"  # where the run writes everything; a run is continued by its directory
    seed: int = 0  # of the data order and of all sampling
    # rollout batches between checkpoints; 0: only at the end and on a signal
    save_interval: int = 50
    keep_last: int = 2  # checkpoints kept
    keep_every: int = 0  # and every checkpoint whose rollout batch is a multiple of this; 0: none
    # none | replayable (what the steps since the oldest checkpoint trained on, 9 to 13 bytes a
    # token and the text, so that `train RUN --replay STEP` takes them again) | all (of every step)
    record: str = "replayable"
    async_save: bool = False  # write checkpoints while training goes on, from a copy in host memory
    # who gets every line of metrics.jsonl too: tensorboard | wandb | mlflow
    logbooks: list[str] = field(default_factory=list)
    tensorboard: bool = False  # as one of logbooks
    project: str = "megatron_stare"  # of wandb, and the experiment of mlflow
    # the newest line, for Prometheus to ask for (0: none); a comparison's runs: at ports from here
    prometheus_port: int = 0
    prometheus_host: str = "127.0.0.1"  # where it is offered
    # seconds without any movement, or without a sign of some rank, after which the run says where
    # every rank is and ends; 0: never. Above the time-outs of servers and of remote rewards
    hang_timeout: float = 900.0


@dataclass(frozen=True)
class DataConfig:
    # one source: file or directory, several by commas, or package.module.function (sources.py)
    prompt_data: str = ""
    # a mixture instead: {source: weight, ...} (mixture.py)
    sources: dict[str, float] = field(default_factory=dict)
    input_key: str = "prompt"  # text or messages
    label_key: str = "label"  # what the verifier compares with
    metadata_key: str = "metadata"  # an object for the verifier and the environment
    tool_key: str = "tools"  # schemas of the functions that a row's chat template offers
    system_prompt: str = ""  # for rows without a system message of their own
    # a prompt of text becomes a user message; false: it is encoded as it stands
    wrap_text: bool = False
    apply_chat_template: bool = True  # where the prompt is a list of messages
    # a longer prompt is an error, or skipped and counted by on_bad_row
    rollout_max_prompt_len: int = 1024
    on_bad_row: str = "error"  # error | skip
    # none | exact | normalised: of training prompts that ask the same, keep the first
    deduplicate: str = "none"
    # leave out problems of evaluation.eval_data; false: say how many there are
    drop_evaluation_prompts: bool = False
    shuffle: bool = True  # another order in every epoch; false: the file's


@dataclass(frozen=True)
class ScoringConfig:
    # a name in scoring/rewards.py, or a dotted path package.module.function; it says what is right
    reward: str = "math"
    # what its value becomes: none | signed (1 right, -1 wrong) | retool (signed, and a wrong answer
    # gains 0.1 for each round with a tool, up to -0.6)
    shaping: str = "none"
    # weights of a sum, e.g. {math: 1, format: 0.1}; empty: reward
    rewards: dict[str, float] = field(default_factory=dict)
    # of math and multiple_choice: boxed | answer ("Answer:" line) | tag | any
    extraction: str = "any"
    answer_tag: str = "answer"  # of extraction=tag: <answer>...</answer>
    # relative, where one of two numbers is a decimal and the label is no integer
    numeric_tolerance: float = 1e-6
    # of math: whether an answer that is still to be computed is wrong (a sum, a gcd, 3 + 4):
    # auto (where the label is a number) | always | never
    require_evaluated: str = "auto"
    # of the reward `format`: a regular expression to be found in the response
    format_pattern: str = ""
    # of the reward `language`: the expected script, a name in scoring/verifiers.py
    language: str = "latin"
    # DAPO's soft penalty over this many tokens before the limit; 0: off
    overlong_buffer_len: int = 0
    overlong_penalty_factor: float = 1.0  # its size at the limit
    overlong_filter: bool = False  # mask truncated responses out of the loss
    remote_url: str = ""  # of the reward `remote`: a reward model behind HTTP
    remote_timeout: float = 60.0  # seconds for one of its answers
    remote_attempts: int = 4  # faulty answers to one request before its response is unverifiable
    remote_concurrency: int = 32  # requests in flight
    # on each rank; 0: the machine's cores divided by its ranks, at most 16
    verifier_processes: int = 0
    # seconds for one response, then its process is killed; tried twice, except for one whose own
    # evaluation took them (wrong)
    verifier_timeout: float = 5.0
    # of code: seconds of all tests of one program together; those it does not reach are failed
    code_seconds: float = 60.0
    # of code: what a test may print; 0: sandbox.output_bytes
    code_output_bytes: int = 8388608
    # of code: the share of tests passed; false: 1 for all of them, 0 from the first failure on
    code_partial_credit: bool = True
    verifier_memory_mib: int = 4096  # address space of one verifier process; 0: no limit
    # from rewards to advantages, a name in numerics/advantages.py: grpo | dr_grpo | rloo | opo |
    # reinforce_plus_plus | reinforce_plus_plus_baseline | gpg | grpo_passk | hapo | w_reinf | psr |
    # nsr | qae | remax
    advantage: str = "grpo"
    # its settings, e.g. {positive: 0.1} of w_reinf
    advantage_settings: dict[str, float] = field(default_factory=dict)
    normalize_by_std: bool = True  # of grpo, grpo_passk and hapo; false for grpo is dr_grpo


@dataclass(frozen=True)
class EvaluationSetConfig:
    """One set's own settings; unset: those of EvaluationConfig."""

    n_samples: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_response_len: int | None = None


@dataclass(frozen=True)
class EvaluationConfig:
    eval_interval: int = 0  # 0: never during training
    eval_data: dict[str, str] = field(default_factory=dict)  # name -> source, as data.prompt_data
    n_samples_per_eval_prompt: int = 8  # k of avg@k, pass@k and majority@k
    eval_temperature: float = 1.0  # 0: greedy, one sample of each problem
    eval_top_p: float = 1.0  # sample from the most likely tokens of this total probability
    eval_top_k: int = 0  # sample from this many of the most likely tokens; 0: off
    eval_max_response_len: int = 0  # 0: rollout_max_response_len
    # e.g. per_set.aime24.n_samples=32
    per_set: dict[str, EvaluationSetConfig] = field(default_factory=dict)
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
class DiagnosticsConfig:
    """What a run says about entropy beyond its mean (docs/diagnostics.md)."""

    # steps between two files of run.dir/diagnostics, which begin with step 1; 0: none, and no
    # entropy_change/... and clip_fraction in metrics.jsonl
    interval: int = 10
    rollouts: int = 16  # of a file, token by token
    tokens: int = 40  # rows of each of its tables of tokens
    # score every batch once more behind its updates: entropy_change/realised, on the same tokens
    realised: bool = False


@dataclass(frozen=True)
class AlarmsConfig:
    """When a run says that something goes wrong, on stderr and in run.dir/alarms.jsonl
    (docs/diagnostics.md). A limit of 0: that alarm is off.
    """

    # names of the alarms that end the run, with a checkpoint: entropy, gradient, mismatch, length,
    # format, repeated, reward, nonfinite
    stop: list[str] = field(default_factory=list)
    patience: int = 10  # steps in a row before entropy, length and format are alarms
    window: int = 50  # steps that are remembered, and until the same alarm is told again
    # times the loss's target entropy, or the first step's entropy of a loss without a target
    entropy_low: float = 0.5
    entropy_high: float = 3.0  # times the same
    gradient: float = 10.0  # times the median of the gradient norm
    mismatch: float = 0.1  # nats: mean |ln pi_trainer - ln pi_engine|
    length: float = 2.0  # times the median response length, or its inverse
    format: float = 0.25  # of the rollouts: how many more than usual are cut off, or give no answer
    repeated: float = 0.1  # of the rollouts: how many end in one stretch of tokens over and over
    # how much accuracy falls, from half a window to the next, while the reward rises
    reward: float = 0.05


@dataclass(frozen=True)
class CompareConfig:
    """Several runs from one start. `arms` maps an arm's name to its overrides;
    no arms: one ordinary run.
    """

    # mirror_grid | calculator: make a quickstart's data and model under run.dir first
    world: str = ""
    arms: dict[str, list[str]] = field(default_factory=dict)  # name -> overrides of one run
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
    diagnostics: DiagnosticsConfig = field(default_factory=DiagnosticsConfig)
    alarms: AlarmsConfig = field(default_factory=AlarmsConfig)
    cold_start: ColdStartConfig = field(default_factory=ColdStartConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)
