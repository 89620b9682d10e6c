"""The configuration of a run: its stages, their limits, and overrides. Import from here."""

from megatron_stare.config.dotted import callable_at
from megatron_stare.config.errors import (
    EngineError,
    MismatchAlarm,
    NonFiniteError,
    NoSignalError,
    RunAlarm,
    UserError,
    nearest,
)
from megatron_stare.config.overrides import (
    check_arms,
    differences,
    dump,
    load,
    moved_keys,
    override,
    without_secrets,
)
from megatron_stare.config.rollouts import (
    ResamplingConfig,
    RolloutConfig,
    SandboxConfig,
    SGLangConfig,
    ToolsConfig,
)
from megatron_stare.config.stages import (
    AlarmsConfig,
    CompareConfig,
    Config,
    DataConfig,
    DiagnosticsConfig,
    EvaluationConfig,
    EvaluationSetConfig,
    RunConfig,
    ScoringConfig,
)
from megatron_stare.config.training import (
    ColdStartConfig,
    LossConfig,
    MismatchConfig,
    OptimizerConfig,
    PolicyConfig,
    TrainConfig,
)
from megatron_stare.config.tuning import TuningConfig

__all__ = [
    "AlarmsConfig",
    "ColdStartConfig",
    "CompareConfig",
    "Config",
    "DataConfig",
    "DiagnosticsConfig",
    "EngineError",
    "EvaluationConfig",
    "EvaluationSetConfig",
    "LossConfig",
    "MismatchAlarm",
    "MismatchConfig",
    "NoSignalError",
    "NonFiniteError",
    "OptimizerConfig",
    "PolicyConfig",
    "ResamplingConfig",
    "RolloutConfig",
    "RunAlarm",
    "RunConfig",
    "SGLangConfig",
    "SandboxConfig",
    "ScoringConfig",
    "ToolsConfig",
    "TrainConfig",
    "TuningConfig",
    "UserError",
    "callable_at",
    "check_arms",
    "differences",
    "dump",
    "load",
    "moved_keys",
    "nearest",
    "override",
    "without_secrets",
]
