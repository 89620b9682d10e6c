"""The stages that change weights: the policy, its optimizer, the loss, the update."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_stare.config.tuning import TuningConfig


@dataclass(frozen=True)
class PolicyConfig:
    ref_hf_checkpoint: str = ""  # the KL term's reference; empty: hf_checkpoint
    # config.json, tokenizer and weights: *.safetensors, or what `convert` made of them
    hf_checkpoint: str = ""
    tensor_model_parallel_size: int = 1  # ranks that split every matrix
    pipeline_model_parallel_size: int = 1  # stages that share out the layers
    # model chunks per pipeline stage (interleaved schedule)
    virtual_pipeline_model_parallel_size: int = 1
    num_layers_in_first_pipeline_stage: int = 0  # uneven stages; 0: equal
    num_layers_in_last_pipeline_stage: int = 0  # the same at the other end
    context_parallel_size: int = 1  # ranks that split every sequence
    expert_model_parallel_size: int = 1  # ranks over which a layer's experts are dealt out
    # ranks over which one expert is split; 0: tensor_model_parallel_size
    expert_tensor_parallel_size: int = 0
    sequence_parallel: bool = False  # tensor ranks also split activations between matrices
    use_distributed_optimizer: bool = False  # replicas share out the optimizer's state
    recompute_granularity: str = "none"  # none | selective (recompute_modules) | full (every layer)
    # of every layer, by commas: core_attn, layernorm, mlp, moe, moe_act
    recompute_modules: str = "core_attn"
    dtype: str = "fp32"  # fp32 | bf16
    fp8: str = "none"  # none | e4m3 | hybrid: TransformerEngine's fp8 matrix products, with bf16
    max_tokens_per_gpu: int = 16384  # hard bound on the tokens of one micro-batch, padding included
    # error | own_micro_batch: a sequence over max_tokens_per_gpu; never cut
    on_long_sequence: str = "error"
    # sequences end to end; false: right-padded (quicker for many short ones on a CPU)
    packed_sequences: bool = True
    # fused | recompute | logits: how the vocabulary projection is run (policy/head.py)
    head: str = "fused"
    # logits of one chunk of rows, in the fused and recompute heads; unset: an 80th of the GPU's
    # memory, 64 on a CPU
    head_workspace_mib: int | None = None
    # of a model with experts, whose choices the trainer's routers repeat (docs/experts.md): none |
    # rollout (the engine's, in scoring and update; R3) | old_policy (scoring's, in its updates; R2)
    routing_replay: str = "none"
    # times the load-balancing loss of every layer with experts (policy/experts.py)
    moe_aux_loss_coeff: float = 0.0
    # none | fp8: experts' weights are those of E4M3 blocks of 128 x 128, as an FP8 server has them,
    # and gradients move their fp32 copies (docs/experts.md)
    expert_quantization: str = "none"
    # optimizer state to host memory and gradient buffers freed between updates, for a rollout
    # engine on the same GPU
    offload_while_generating: bool = False
    # a sequence's log-probs do not depend on what it is packed with: Megatron's batch-invariant
    # kernels, slower (docs/mismatch.md)
    batch_invariant: bool = False
    tuning: TuningConfig = field(default_factory=TuningConfig)


@dataclass(frozen=True)
class OptimizerConfig:
    lr: float = 1e-6  # the highest learning rate, after warm-up
    min_lr: float = 0.0  # where a decay ends
    lr_decay_style: str = "constant"  # constant | linear | cosine
    lr_decay_iters: int = 0  # 0: all steps of the run
    lr_warmup_iters: int = 0  # optimizer steps from 0 to lr
    weight_decay: float = 0.01  # decoupled, as in AdamW
    adam_beta1: float = 0.9  # of the mean of gradients
    adam_beta2: float = 0.98  # of the mean of their squares
    adam_eps: float = 1e-8  # added to the root of the latter
    clip_grad: float = 1.0  # largest norm of the whole gradient


@dataclass(frozen=True)
class LossConfig:
    name: str = "stare"  # python -m megatron_stare algorithms lists them
    # Unset: the objective's published value (algorithms NAME).
    eps_clip: float | None = None
    eps_clip_high: float | None = None  # the ratio is clipped above 1 + this
    eps_clip_c: float | None = None  # dual clip; 0: off
    # token-mean | seq-mean-token-mean | seq-mean-token-sum | seq-mean-token-sum-norm | row-mean
    aggregation: str | None = None
    # what seq-mean-token-sum-norm divides by; unset: rollout.rollout_max_response_len
    padded_length: int | None = None
    # the objective's own settings, e.g. settings.w_min=0.7; checked against what it declares
    settings: dict[str, Any] = field(default_factory=dict)
    # stare: multiply its weights, from its fields below, into the loss of another `name`
    reweight: str = "none"  # none | stare
    # times the KL to policy.ref_hf_checkpoint, added to every token's loss
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "k3"  # k1 | abs | k2 | k3 | low_var_kl
    variant: str = "O1"  # O1 | C2
    top_p_ratio: float = 0.1  # stare's P: share of the tokens of either sign that is reweighted
    reweight_w: float = 1.1  # W of L+, the most surprising tokens with A > 0
    reweight_m: float = 0.9  # M of L-, those with A < 0
    target_entropy: float = 0.3  # nats per token
    gate: bool = True  # act only while batch entropy is below target_entropy
    adaptive: bool = False  # move W and M by alpha each step
    alpha: float = 0.01  # of adaptive: the step
    w_max: float = 1.5  # of adaptive: W stays in [1, w_max]
    m_min: float = 0.5  # of adaptive: M stays in [m_min, 1]
    # what L+ and L- are the most of: surprisal | sensitivity (largest |A| g, the exact effect)
    select: str = "surprisal"
    # who adapts W and M: bang_bang (the paper's, with `adaptive`) | critical (stare_gate.py)
    controller: str = "bang_bang"
    scope: str = "global"  # global | microbatch | sequence
    sensitivity_metrics: bool = True  # entropy sensitivity per quadrant, and the critical weight W*


@dataclass(frozen=True)
class MismatchConfig:
    """Where the rollout policy is another than the trainer's: kernels, precision, staleness."""

    # Where the loss's ratio starts, per token. trainer: at the trainer's log-probs, so at 1.
    # rollout: at those it was sampled with; no correction. auto: tokens of the current weights at
    # the trainer's, stale ones at those they were sampled with, unless a correction is set, which
    # then corrects for them.
    old_policy: str = "auto"
    # token_tis | sequence_tis | token_mis | sequence_mis | icepop | geo_rs
    correction: str = "none"
    lower: float = 0.0  # bounds of the ratio; 0: the method's own (losses/rollout_correction.py)
    upper: float = 0.0  # the same
    normalize: bool = False  # scale the weights to mean 1
    # tokens of weight 0: zero (they stay in the loss's denominator) | drop (they leave it)
    rejected: str = "zero"
    # what the others of a *_mis correction and of icepop weigh: ratio | one
    accepted: str = "ratio"
    # nats: mean |ln pi_trainer - ln pi_rollout| of a batch that raises the alarm; 0: never
    alarm: float = 0.0
    # prompts on which engine and trainer are compared before the first step; they end the run where
    # the two differ by more than `alarm`, or alarms.mismatch (docs/mismatch.md); 0: none
    parity_before: int = 0
    on_alarm: str = "stop"  # stop | mask (tokens that differ by more than `alarm` do not count)


@dataclass(frozen=True)
class TrainConfig:
    num_rollout: int = 1000  # rollout batches of the run; each is one line of metrics.jsonl
    num_steps_per_rollout: int = 1  # mini-batches of whole groups, one optimizer step each
    epochs: int = 1  # passes over a rollout batch
    # steps in a row whose update is left out, as a statistic or the gradient is not finite, after
    # which the run stops
    max_nonfinite_steps: int = 3
    # score again and plan again before every further update; false: the first plan stays
    replan: bool = True


@dataclass(frozen=True)
class ColdStartConfig:
    """Supervised steps before RL; none where `data` is empty.

    Rows of {"messages": [...], "tools": [...]} (loss on the assistant's tokens) or of {"prompt",
    "response"} as text.
    """

    data: str = ""  # a source of such rows
    steps: int = 0  # optimizer steps
    batch_size: int = 128  # rows in one of them
    lr: float = 5e-3  # falls linearly to min_lr_ratio of it
    min_lr_ratio: float = 0.05  # what is left of lr at the end
    weight_decay: float = 0.01  # decoupled, as in AdamW
