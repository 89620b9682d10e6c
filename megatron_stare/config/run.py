"""The configuration of a run as a whole: its directory, diagnostics, alarms and comparisons, all
sections, and every setting by its dotted key.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import Field

from megatron_stare.config.rollout import (
    AgentsConfig,
    RolloutConfig,
    SandboxConfig,
    SGLangConfig,
    ToolsConfig,
)
from megatron_stare.config.section import (
    Count,
    Fraction,
    Integer,
    NonNegative,
    Setting,
    Whole,
    fields_of,
    section,
    setting_of,
)
from megatron_stare.config.task import DataConfig, EvaluationConfig, JudgeConfig, ScoringConfig
from megatron_stare.config.training import (
    AdaptersConfig,
    ColdStartConfig,
    LossConfig,
    MismatchConfig,
    OptimizerConfig,
    PolicyConfig,
    TrainConfig,
)

AlarmName = Literal[
    "entropy", "selection", "weight", "gradient", "mismatch", "exactness", "length", "format",
    "repeated", "reward", "nonfinite",
]  # fmt: skip


@section
class RunConfig:
    """The directory of a run, what it keeps there, and the services that receive its metrics."""

    dir: str = "runs/latest"
    """Directory of everything that the run writes; the same directory resumes the run."""
    seed: Whole = 0
    """Random seed of the data order and of all sampling."""
    save_interval: Whole = 50
    """Number of rollout batches between two checkpoints; 0 saves only at the end or on a signal."""
    keep_last: Count = 2
    """Number of newest checkpoints that are kept."""
    keep_every: Whole = 0
    """Also keep every checkpoint whose rollout batch is a multiple of this number; 0 keeps none."""
    keep_best: str = ""
    """Metric of an evaluation, e.g. `eval/aime24/avg_at_k`: the checkpoint with its highest value
    is also kept, and `--load best` takes it."""
    record: Literal["none", "replayable", "all"] = "replayable"
    """Training input that is stored for `train RUN --replay STEP`, at 9 to 13 bytes per token plus
    the text: `replayable` keeps the steps since the oldest checkpoint, `all` keeps every step.
    `none` stores nothing, and no responses of evaluations either."""
    async_save: bool = False
    """Write checkpoints in the background while training continues, from a copy in host memory."""
    logbooks: list[Literal["tensorboard", "wandb", "mlflow"]] = Field(default_factory=list)
    """Trackers that receive every line of metrics.jsonl, e.g. `[tensorboard, wandb]`."""
    project: str = "megatron_stare"
    """Name of the project in wandb and of the experiment in MLflow."""
    prometheus_port: Annotated[Integer, Ge(0), Le(65535)] = 0
    """Port on which the latest metrics are served to Prometheus; 0 turns the server off. The runs
    of a comparison use consecutive ports, starting here."""
    prometheus_host: str = "127.0.0.1"
    """Network interface on which the latest metrics are served to Prometheus."""
    hang_timeout: NonNegative = 900.0
    """Seconds without progress, or without a heartbeat of some rank, after which the run reports
    where every rank is and exits; 0 waits forever. The value should exceed the time-outs of
    servers, of tool calls and of remote rewards."""


@section
class DiagnosticsConfig:
    """Files about entropy beyond its mean (docs/diagnostics.md)."""

    interval: Whole = 10
    """Number of steps between two files in run.dir/diagnostics, starting with step 1; 0 writes no
    file and drops entropy_change/... and clip_fraction from metrics.jsonl."""
    rollouts: Whole = 16
    """Number of rollouts that a diagnostics file shows token by token."""
    tokens: Whole = 40
    """Number of rows in each token table of a diagnostics file."""
    realised: bool = False
    """Score every batch again after its updates, for entropy_change/realised of the same tokens."""


@section
class AlarmsConfig:
    """Signs of a failing run, reported on stderr and in run.dir/alarms.jsonl (docs/diagnostics.md).

    A limit of 0 turns its alarm off.
    """

    stop: list[AlarmName] = Field(default_factory=list)
    """Names of the alarms that end the run with a checkpoint; other alarms only warn."""
    patience: Count = 10
    """Number of consecutive steps beyond a limit before entropy, weight, length or format raise
    alarms, and number of steps over which the alarm selection takes its median."""
    window: Annotated[Integer, Ge(2)] = 50
    """Number of recent steps for medians, and for which a raised alarm is not repeated."""
    entropy_low: Fraction = 0.5
    """Lower limit of the batch entropy, as a multiple of the loss's target entropy, or of the first
    step's entropy if the loss has no target."""
    entropy_high: NonNegative = 3.0
    """Upper limit of the batch entropy, as a multiple of the loss's target entropy, or of the first
    step's entropy if the loss has no target."""
    gradient: NonNegative = 10.0
    """Upper limit of the gradient norm, as a multiple of its median."""
    mismatch: NonNegative = 0.1
    """Upper limit of the mean |ln pi_trainer - ln pi_engine| of a batch, in nats."""
    exactness: NonNegative = 0.1
    """Upper limit of |mean(surprisal - entropy)| of sampled tokens, as a multiple of the entropy,
    for batches with |exactness_z| above 6."""
    length: NonNegative = 2.0
    """Factor by which the mean response length may rise above, or fall below, its median."""
    format: Fraction = 0.25
    """Upper limit of the increase in the fraction of rollouts truncated or without an answer."""
    repeated: Fraction = 0.1
    """Upper limit of the fraction of rollouts that end by repeating one stretch of text."""
    reward: Fraction = 0.05
    """Upper limit of the fall in accuracy from one half-window to the next as the reward rises."""


@section
class CompareConfig:
    """Several runs (arms) from one start; without arms, the run is an ordinary one."""

    world: Literal["", "mirror_grid", "calculator"] = ""
    """Toy task whose data and model are first generated under run.dir; empty generates nothing."""
    arms: dict[str, list[str]] = Field(default_factory=dict)
    """Overrides of each arm by the arm's name, e.g. `{stare: [], grpo: [loss.name=grpo]}`."""
    run: list[str] = Field(default_factory=list)
    """Names of the arms to train; empty trains all of them."""
    seeds: list[Whole] = Field(default_factory=list)
    """Seeds with which every arm is repeated; empty uses run.seed alone."""


@section
class Config:
    """One run: a section per stage, under the names that slime (rollouts), Megatron (parallelism,
    optimizer) and the STARE reference give to the same settings.
    """

    run: RunConfig = Field(default_factory=RunConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    adapters: AdaptersConfig = Field(default_factory=AdaptersConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    sglang: SGLangConfig = Field(default_factory=SGLangConfig)
    sandbox: SandboxConfig = Field(default_factory=SandboxConfig)
    tools: ToolsConfig = Field(default_factory=ToolsConfig)
    agents: AgentsConfig = Field(default_factory=AgentsConfig)
    scoring: ScoringConfig = Field(default_factory=ScoringConfig)
    judge: JudgeConfig = Field(default_factory=JudgeConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    mismatch: MismatchConfig = Field(default_factory=MismatchConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    diagnostics: DiagnosticsConfig = Field(default_factory=DiagnosticsConfig)
    alarms: AlarmsConfig = Field(default_factory=AlarmsConfig)
    cold_start: ColdStartConfig = Field(default_factory=ColdStartConfig)
    compare: CompareConfig = Field(default_factory=CompareConfig)

    @property
    def reference(self) -> str:
        """policy.ref_hf_checkpoint where the loss reads a reference model; else empty."""
        return self.policy.ref_hf_checkpoint if self.loss.reads_reference else ""

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt and response that the limits allow."""
        return self.data.rollout_max_prompt_len + self.rollout.rollout_max_response_len


@functools.cache
def settings() -> dict[str, Setting]:
    """Every setting of a Config by its dotted key, in the order of the source."""
    return {setting.key: setting for setting in _settings_of(Config, "")}


def _settings_of(kind: Any, prefix: str) -> list[Setting]:
    found: list[Setting] = []
    for name, field in fields_of(kind).items():
        if dataclasses.is_dataclass(field.annotation):
            found += _settings_of(field.annotation, f"{prefix}{name}.")
        else:
            found.append(setting_of(f"{prefix}{name}", field))
    return found


def kind_of_values(key: str) -> Any:
    """The type of the values of a setting that maps free names; None for any other key."""
    setting = settings().get(key)
    if setting is None or typing.get_origin(setting.kind) is not dict:
        return None
    return typing.get_args(setting.kind)[1]


def lookup(config: Config, key: str) -> Any:
    """The value of a dotted key; None if a free name within it is not set."""
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else getattr(node, part, None)
    return node
