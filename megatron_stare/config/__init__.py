"""The configuration of a run: its sections, overrides and files. Import from here."""

from megatron_stare.config.errors import (
    EngineError,
    MismatchAlarm,
    NonFiniteError,
    NoSignalError,
    RunAlarm,
    TaskSolved,
    UserError,
    callable_at,
    from_hub,
    nearest,
)
from megatron_stare.config.overrides import (
    check_arms,
    differences,
    dump,
    from_tree,
    load,
    override,
    without_secrets,
)
from megatron_stare.config.rollout import (
    AgentsConfig,
    ResamplingConfig,
    RolloutConfig,
    SandboxConfig,
    SGLangConfig,
    ToolsConfig,
)
from megatron_stare.config.run import (
    AlarmsConfig,
    CompareConfig,
    Config,
    DiagnosticsConfig,
    RunConfig,
    lookup,
)
from megatron_stare.config.task import (
    DATA_SOURCE,
    PER_SOURCE,
    DataConfig,
    EvaluationConfig,
    EvaluationSetConfig,
    JudgeConfig,
    ScoringConfig,
    source_of,
)
from megatron_stare.config.training import (
    AdaptersConfig,
    ColdStartConfig,
    LossConfig,
    MismatchConfig,
    OptimizerConfig,
    PolicyConfig,
    TrainConfig,
    TuningConfig,
)
