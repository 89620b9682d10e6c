"""The whole configuration of a run."""

from __future__ import annotations

from pydantic import Field

from megatron_stare.config.rollout import (
    AgentsConfig,
    RolloutConfig,
    SandboxConfig,
    SGLangConfig,
    ToolsConfig,
)
from megatron_stare.config.run import AlarmsConfig, CompareConfig, DiagnosticsConfig, RunConfig
from megatron_stare.config.section import section
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
