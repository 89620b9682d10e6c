"""The sections about training: the model and its layout, optimizer, updates, cold start, loss."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import Field

from megatron_stare.config.section import (
    AtLeastOne,
    Count,
    Fraction,
    Integer,
    Momentum,
    NonNegative,
    Positive,
    Whole,
    section,
)

Aggregation = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm",
    "row-mean",
]  # fmt: skip


@section
class TuningConfig:
    """Switches that make the same training faster or smaller on a GPU (docs/tuning.md).

    An unset switch is on where the hardware and the layout support it and it helps. The names are
    Megatron's.
    """

    gradient_accumulation_fusion: bool | None = None
    """Add each weight gradient to its fp32 sum inside the matrix product."""
    bias_activation_fusion: bool | None = None
    """Compute the SiLU and the product of the gated MLP in one kernel."""
    bias_dropout_fusion: bool | None = None
    """Compute the residual additions in fused kernels."""
    apply_rope_fusion: bool | None = None
    """Rotate the positions of all packed sequences in one kernel."""
    moe_permute_fusion: bool | None = None
    """Move tokens to their experts and back in fused kernels."""
    moe_router_fusion: bool | None = None
    """Compute the softmax and the choice of experts in one kernel."""
    overlap_grad_reduce: bool | None = None
    """Sum gradients over data-parallel replicas during the backward pass."""
    batch_p2p_sync: bool | None = None
    """Synchronise the device after every send between pipeline stages, as older torch requires."""
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] | None = None
    """How the scales of policy.fp8 are computed."""


@section
class PolicyConfig:
    """The model that learns, its parallel layout and its memory (docs/scale.md)."""

    ref_hf_checkpoint: str = ""
    """Model directory of the reference policy in the KL term; empty uses policy.hf_checkpoint."""
    ref_update_interval: Whole = 0
    """Number of rollout batches between two updates of the reference policy, each of which makes it
    a copy of the policy; 0 never updates it."""
    hf_checkpoint: str = ""
    """Model directory to start from: config.json, tokenizer and weights, either *.safetensors or
    the output of `convert`."""
    tensor_model_parallel_size: Count = 1
    """Number of ranks that split every matrix (TP)."""
    pipeline_model_parallel_size: Count = 1
    """Number of pipeline stages that split the layers (PP)."""
    virtual_pipeline_model_parallel_size: Count = 1
    """Number of model chunks on each pipeline stage; more than 1 is the interleaved schedule."""
    num_layers_in_first_pipeline_stage: Whole = 0
    """Number of layers on the first pipeline stage; 0 splits the layers evenly."""
    num_layers_in_last_pipeline_stage: Whole = 0
    """Number of layers on the last pipeline stage; 0 splits the layers evenly."""
    context_parallel_size: Count = 1
    """Number of ranks that split every sequence (CP)."""
    expert_model_parallel_size: Count = 1
    """Number of ranks over which the experts of a layer are distributed (EP)."""
    expert_tensor_parallel_size: Whole = 0
    """Number of ranks that split an expert's matrices; 0 uses policy.tensor_model_parallel_size."""
    sequence_parallel: bool = False
    """Split activations between matrices over the tensor-parallel ranks."""
    use_distributed_optimizer: bool = False
    """Split the optimizer state over the data-parallel replicas."""
    recompute_granularity: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass recomputes: none, those of policy.recompute_modules, or
    all."""
    recompute_modules: str = "core_attn"
    """Modules that `selective` recomputes, by commas: core_attn, layernorm, mlp, moe, moe_act."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Number format of weights and activations in the trainer."""
    fp8: Literal["none", "e4m3", "hybrid"] = "none"
    """FP8 format of TransformerEngine's matrix products; it needs policy.dtype=bf16."""
    max_tokens_per_gpu: Count = 16384
    """Maximum number of tokens in one micro-batch on one GPU, padding included."""
    on_long_sequence: Literal["error", "own_micro_batch"] = "error"
    """Treatment of a sequence longer than policy.max_tokens_per_gpu: the run ends, or the
    sequence gets a micro-batch of its own; it is never truncated."""
    packed_sequences: bool = True
    """Pack sequences end to end; false pads them, which is faster for many short ones on a CPU."""
    shared_prompts: bool = False
    """Compute the prompt of a group once for all of its responses that are in one micro-batch."""
    head: Literal["fused", "recompute", "logits"] = "fused"
    """How the vocabulary projection runs: `fused` and `recompute` work in chunks and keep no full
    logits, `logits` keeps them all."""
    head_workspace_mib: Count | None = None
    """Memory in MiB for one chunk of logits in the fused and recompute heads; unset uses 1/80 of
    the GPU's memory, or 64 on a CPU."""
    fp32_logits: bool = False
    """Keep the logits in fp32 instead of rounding them to policy.dtype, and start SGLang servers
    that do so (docs/mismatch.md)."""
    routing_replay: Literal["none", "rollout", "old_policy"] = "none"
    """Expert choices that the trainer's routers repeat: none, those of the rollout engine (R3), or
    those of the scoring pass in its updates (R2); see docs/experts.md."""
    moe_aux_loss_coeff: NonNegative = 0.0
    """Coefficient of the load-balancing loss of every layer with experts."""
    weight_quantization: Literal["none", "fp8", "fp8_experts"] = "none"
    """Weights that are rounded to E4M3 blocks of 128 x 128, as FP8 servers hold them, while
    gradients update fp32 copies: those of all linear layers, or of experts
    (docs/fp8_servers.md)."""
    offload_while_generating: bool = False
    """Move the optimizer state and a reference model to host memory and free gradient buffers
    between updates, so that a rollout engine fits on the same GPU."""
    batch_invariant: bool = False
    """Use Megatron's slower batch-invariant kernels, so that a sequence's log-probs do not depend
    on what it is packed with (docs/mismatch.md)."""
    deterministic: bool = False
    """Compute the same bits again on a GPU, which is slower: deterministic kernels of
    TransformerEngine, cuBLAS and torch, and NCCL's rings. A CPU always does."""
    tuning: TuningConfig = Field(default_factory=TuningConfig)
    """Switches that make the same training faster or smaller on a GPU."""

    @property
    def sequence_budget(self) -> int:
        """Tokens of a micro-batch on all context ranks together."""
        return self.max_tokens_per_gpu * self.context_parallel_size


@section
class AdaptersConfig:
    """Low-rank adapters (LoRA) that train in place of the weights."""

    rank: Whole = 0
    """Rank of every adapter; 0 trains the weights themselves and makes no adapters."""
    alpha: Positive = 32.0
    """Scale of the adapters: a weight W acts as W + adapters.alpha / adapters.rank * B A."""
    targets: str = "q,k,v,o,gate,up,down"
    """Projections that have an adapter, separated by commas: q, k, v, o, gate, up, down. Latent
    attention makes k and v together: name both or neither."""
    experts: Literal["each", "shared", "none"] = "each"
    """Adapters of routed experts where adapters.targets names gate, up or down: each expert has its
    own, all experts of a layer share one, or experts have none."""
    start: str = ""
    """PEFT directory of adapters to start a new run with; empty is B = 0, the base model."""
    merge: bool = True
    """Whether engines receive weights with the adapters merged in; false gives them the base and
    the adapters apart, which they apply without rounding any weight."""

    @property
    def apart(self) -> bool:
        """Whether engines get adapters apart from the weights."""
        return self.rank > 0 and not self.merge

    @property
    def target_names(self) -> set[str]:
        """The names in `targets`."""
        return {name.strip() for name in self.targets.split(",")}


@section
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    lr: NonNegative = 1e-6
    """Peak learning rate, reached after warm-up."""
    min_lr: NonNegative = 0.0
    """Learning rate at the end of a linear or cosine decay."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning-rate decay after warm-up."""
    lr_decay_iters: Whole = 0
    """Optimizer steps until the learning rate reaches optimizer.min_lr; 0 uses the whole run."""
    lr_warmup_iters: Whole = 0
    """Number of optimizer steps over which the learning rate rises from 0 to optimizer.lr."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay of AdamW."""
    adam_beta1: Momentum = 0.9
    """Decay rate of Adam's running mean of gradients."""
    adam_beta2: Momentum = 0.98
    """Decay rate of Adam's running mean of squared gradients."""
    adam_eps: Positive = 1e-8
    """Constant that Adam adds to the root of the mean squared gradient."""
    clip_grad: Positive = 1.0
    """Maximum norm of the whole gradient; a larger gradient is scaled down to it."""


@section
class TrainConfig:
    """The length of a run, and how often a rollout batch is used."""

    num_rollout: Count = 1000
    """Number of rollout batches in the run; each one writes a line of metrics.jsonl. A pass over
    the data takes as many as it has prompts, divided by rollout.rollout_batch_size."""
    num_steps_per_rollout: Count = 1
    """Number of mini-batches of whole groups in a rollout batch, with one optimizer step each."""
    epochs: Count = 1
    """Number of passes over each rollout batch."""
    max_nonfinite_steps: Count = 3
    """Number of consecutive steps skipped for non-finite values after which the run stops."""
    replan: bool = True
    """Score the batch again and plan the loss again before every update after the first; if false,
    the first plan is used for all updates."""


@section
class ColdStartConfig:
    """Supervised steps before RL, if `data` and `steps` are set. A quickstart generates its `data`.

    Rows are {"messages": [...], "tools": [...]}, with the loss on the assistant's tokens, or
    {"prompt", "response"} as text.
    """

    data: str = ""
    """Source of the supervised rows, written as in data.prompt_data."""
    steps: Whole = 0
    """Number of supervised optimizer steps."""
    batch_size: Count = 128
    """Number of rows in one supervised step."""
    lr: NonNegative = 5e-3
    """Initial learning rate, which falls by a cosine to cold_start.min_lr_ratio of this value."""
    min_lr_ratio: Fraction = 0.05
    """Fraction of cold_start.lr that is left at the last supervised step."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay of AdamW in the supervised steps."""

    @property
    def runs(self) -> bool:
        """Whether supervised steps come before RL."""
        return bool(self.data and self.steps)


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
    aggregation: Aggregation | None = None
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
