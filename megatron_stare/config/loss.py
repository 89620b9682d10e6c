"""The sections about the loss, and about differences between trainer and rollout engine."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import Field

from megatron_stare.config.section import (
    AtLeastOne,
    Count,
    Fraction,
    Integer,
    NonNegative,
    Whole,
    section,
)


@section
class LossConfig:
    """The objective. STARE's settings are fields here; those of other objectives are keys of
    `settings`, listed by `python -m megatron_stare algorithms NAME`.
    """

    name: str = "stare"
    """Objective: a name that `python -m megatron_stare algorithms` lists, or a function
    package.module.name under @policy_loss()."""
    eps_clip: Fraction | None = None
    """Lower clip range: ratios are clipped below 1 - eps_clip; unset uses the objective's value."""
    eps_clip_high: NonNegative | None = None
    """Upper clip range: ratios are clipped above 1 + eps_clip_high; unset uses the objective's
    value."""
    eps_clip_c: NonNegative | None = None
    """Bound of the dual clip on tokens with a negative advantage, above 1; 0 turns it off, and
    unset uses the objective's published value."""
    aggregation: (
        Literal[
            "token-mean",
            "seq-mean-token-mean",
            "seq-mean-token-sum",
            "seq-mean-token-sum-norm",
            "row-mean",
        ]
        | None
    ) = None
    """How token losses become the batch loss; unset uses the objective's own aggregation."""
    padded_length: Count | None = None
    """Divisor of aggregation seq-mean-token-sum-norm; unset is rollout.rollout_max_response_len."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the objective that have no field here, e.g. `loss.settings.w_min=0.7`."""
    reweight: Literal["none", "stare"] = "none"
    """Multiply STARE's token weights, by STARE's settings, into the loss of another objective."""
    kl_loss_coef: NonNegative = 0.0
    """Coefficient of the KL divergence to policy.ref_hf_checkpoint in every token's loss."""
    kl_loss_type: Literal["k1", "k1+", "abs", "k2", "k3", "k3+", "low_var_kl"] = "k3"
    """Estimator of the KL divergence, as in losses/kl.py. `k1+` and `k3+` have the gradient of k2;
    `low_var_kl` is k3."""
    distillation_coef: NonNegative = 0.0
    """On-policy distillation: coefficient of ln pi_teacher - ln pi in every token's advantage, or
    of the exact divergence in its loss. The teacher is policy.ref_hf_checkpoint."""
    distillation_top_k: Whole = 0
    """Number of the policy's likeliest tokens over which the divergence from the teacher is exact,
    all others taken as one; 0 estimates it by the sampled token."""
    reward_coef: NonNegative = 1.0
    """Coefficient of the rewards' advantage next to a teacher's; 0 learns from a teacher alone."""
    variant: Literal["O1", "C2"] = "O1"
    """Variant of STARE: `O1` raises the weight of surprising tokens with positive advantage, `C2`
    also lowers that of surprising tokens with negative advantage."""
    top_p_ratio: Fraction = 0.1
    """STARE's P: fraction of the tokens of each sign of advantage that is reweighted."""
    reweight_w: AtLeastOne = 1.1
    """STARE's W: loss weight of the most surprising tokens with positive advantage."""
    reweight_m: Fraction = 0.9
    """STARE's M: weight of the most surprising tokens with negative advantage, in variant C2."""
    target_entropy: NonNegative = 0.3
    """STARE's target of the mean entropy per token, in nats."""
    gate: bool = True
    """Reweight only while the batch entropy is below loss.target_entropy; if false, always."""
    adaptive: bool = False
    """Move W and M by loss.alpha in every step, towards the target entropy."""
    alpha: NonNegative = 0.01
    """Change of W and M per step, with loss.adaptive=true."""
    w_max: AtLeastOne = 1.5
    """Upper bound of W while it adapts; the lower bound is 1."""
    m_min: Fraction = 0.5
    """Lower bound of M while it adapts; the upper bound is 1."""
    select: Literal["surprisal", "rising", "sensitivity"] = "surprisal"
    """Criterion for the tokens that STARE reweights: the largest surprisal; the same among tokens
    of positive entropy sensitivity g alone (`rising`); or the largest exact effect |A| g."""
    controller: Literal["bang_bang", "critical"] = "bang_bang"
    """Rule that adapts W and M: `bang_bang` is the paper's, with loss.adaptive=true; `critical`
    computes W from the exact entropy sensitivity."""
    scope: Literal["global", "microbatch", "sequence"] = "global"
    """Set of tokens within which the most surprising ones are selected."""
    sensitivity_metrics: bool = True
    """Measure the entropy sensitivity per quadrant and the critical weight W*."""

    @property
    def reads_reference(self) -> bool:
        """Whether a reference model scores every token."""
        return self.kl_loss_coef > 0 or self.distillation_coef > 0


@section
class MismatchConfig:
    """Differences between the policy that sampled and the trainer's: kernels, precision, staleness
    (docs/mismatch.md).
    """

    old_policy: Literal["auto", "trainer", "rollout"] = "auto"
    """Log-probs that the loss's ratio starts from: `trainer` recomputes them, `rollout` takes those
    of sampling, `auto` recomputes them for tokens of the current weights, and for all tokens if a
    correction is set."""
    correction: Literal[
        "none", "token_tis", "sequence_tis", "token_mis", "sequence_mis", "icepop", "geo_rs"
    ] = "none"
    """Importance weight between the trainer's and the rollout log-probs: truncated (tis), masked
    (mis, icepop) or rejected by the geometric mean (geo_rs)."""
    lower: NonNegative = 0.0
    """Lower bound of the importance ratio; 0 uses the method's own bound, or 1 / mismatch.upper if
    that is set and the method is token_mis, sequence_mis or geo_rs."""
    upper: NonNegative = 0.0
    """Upper bound of the importance ratio; 0 uses the method's own bound."""
    normalize: bool = False
    """Scale the importance weights of a batch to mean 1, over tokens or, if a weight is that of a
    whole sequence, over sequences."""
    rejected: Literal["zero", "drop"] = "zero"
    """Tokens of weight 0: `zero` counts them in the loss's denominator, `drop` does not."""
    accepted: Literal["ratio", "one"] = "ratio"
    """Weight of the tokens that a masking correction (mis, icepop) accepts: their ratio, or 1."""
    alarm: NonNegative = 0.0
    """Limit of the mean |ln pi_trainer - ln pi_rollout| of a batch, in nats; 0 raises no alarm."""
    parity_before: Annotated[Integer, Ge(0), Le(1 << 20)] = 0
    """Number of prompts on which engine and trainer are compared before the first step; the run
    ends if they differ by more than mismatch.alarm, or alarms.mismatch; 0 compares nothing."""
    on_alarm: Literal["stop", "mask"] = "stop"
    """Reaction to the alarm: `stop` ends the run, `mask` excludes the tokens that differ by more
    than mismatch.alarm from the loss."""
