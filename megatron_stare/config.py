"""One frozen dataclass per stage of a run, and the typed dotted overrides of the command line.

Field names are the ones the field already uses: slime's for rollouts, Megatron's for parallelism and optimisation,
the STARE reference's for STARE. A recipe (`recipes/`) is a function returning a Config.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError


class UserError(Exception):
    """Something only the user can put right. One line: the field, the value, the remedy. Exit code 2."""


class NoSignalError(UserError):
    """Too few groups with differing rewards. Raised on every rank alike, so that they can save together first."""


@dataclass(frozen=True)
class RunConfig:
    dir: str = "runs/latest"
    seed: int = 0
    save_interval: int = 50  # optimizer steps between checkpoints; 0: only at the end and on a signal
    keep_last: int = 2  # checkpoints kept
    keep_every: int = 0  # and every checkpoint whose step is a multiple of this; 0: none
    async_save: bool = False  # write checkpoints while training goes on, from a copy in host memory
    tensorboard: bool = False


@dataclass(frozen=True)
class DataConfig:
    prompt_data: str = ""  # .jsonl or .parquet
    input_key: str = "prompt"
    label_key: str = "label"
    metadata_key: str = "metadata"
    apply_chat_template: bool = True  # where the prompt is a list of messages
    rollout_max_prompt_len: int = 1024  # a longer prompt is an error, or skipped and counted by on_bad_row
    on_bad_row: str = "error"  # error | skip
    shuffle: bool = True


@dataclass(frozen=True)
class PolicyConfig:
    ref_hf_checkpoint: str = ""  # the KL term's reference; empty: hf_checkpoint
    hf_checkpoint: str = ""  # config.json, tokenizer and weights: *.safetensors, or what `convert` made of them
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int = 1  # model chunks per pipeline stage (interleaved schedule)
    num_layers_in_first_pipeline_stage: int = 0  # uneven stages; 0: equal
    num_layers_in_last_pipeline_stage: int = 0
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1  # ranks over which a layer's experts are dealt out
    expert_tensor_parallel_size: int = 0  # ranks over which one expert is split; 0: tensor_model_parallel_size
    sequence_parallel: bool = False
    use_distributed_optimizer: bool = False
    recompute_granularity: str = "none"  # none | selective (core attention) | full (every layer)
    dtype: str = "fp32"  # fp32 | bf16
    fp8: str = "none"  # none | e4m3 | hybrid: TransformerEngine's fp8 matrix products, with bf16
    max_tokens_per_gpu: int = 16384  # hard bound on the tokens of one micro-batch, padding included
    on_long_sequence: str = "error"  # error | own_micro_batch: a sequence over max_tokens_per_gpu; never cut
    packed_sequences: bool = True  # sequences end to end; false: right-padded (quicker for many short ones on a CPU)
    head: str = "fused"  # fused | recompute | logits: how the vocabulary projection is run (policy/head.py)
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
    rollout_batch_size: int = 64  # prompts (groups) in one optimizer step
    n_samples_per_prompt: int = 8
    over_sampling_batch_size: int = 0  # prompts asked for in one generation round; 0: rollout_batch_size
    rollout_max_response_len: int = 3072
    rollout_temperature: float = 1.0
    rollout_top_p: float = 1.0
    skip_special_tokens: bool = True  # in the text that verifiers see
    engine_batch_size: int = 256  # sequences decoded together by the embedded engine


@dataclass(frozen=True)
class ScoringConfig:
    reward: str = "math"  # a name in scoring/rewards.py, or a dotted path package.module.function
    normalize_by_std: bool = True  # false: Dr.GRPO's advantage
    dynamic_sampling: bool = True  # drop groups whose rewards are all equal, and sample again
    max_generation_rounds: int = 10
    accept_partial_batch: bool = False  # after the last round go on with the groups there are (at least one)
    max_staleness: int = 1  # surplus groups older than this many optimizer steps are dropped and counted


@dataclass(frozen=True)
class LossConfig:
    name: str = "stare"
    eps_clip: float = 0.2
    eps_clip_high: float = 0.28
    eps_clip_c: float = 10.0  # dual clip; 0: off
    aggregation: str = "token-mean"  # token-mean | seq-mean-token-mean | seq-mean-token-sum
    kl_loss_coef: float = 0.0  # times the KL to policy.ref_hf_checkpoint, added to every token's loss
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
class TrainConfig:
    num_rollout: int = 1000  # rollout batches of the run; each is one line of metrics.jsonl
    updates_per_rollout: int = 1  # mini-batches of whole groups, one optimizer step each
    epochs: int = 1  # passes over a rollout batch
    replan: bool = True  # score again and plan anew before every further update; false: the first plan stays


@dataclass(frozen=True)
class EvaluationConfig:
    eval_interval: int = 0  # 0: never during training
    eval_data: dict[str, str] = field(default_factory=dict)  # name -> file
    n_samples_per_eval_prompt: int = 8
    eval_temperature: float = 1.0
    eval_top_p: float = 1.0
    eval_max_response_len: int = 0  # 0: rollout_max_response_len


@dataclass(frozen=True)
class ColdStartConfig:
    """Supervised steps before RL, on rows with `prompt` and `response`; none where `data` is empty."""

    data: str = ""
    steps: int = 0
    batch_size: int = 128
    lr: float = 5e-3
    min_lr_ratio: float = 0.05
    weight_decay: float = 0.01


@dataclass(frozen=True)
class CompareConfig:
    """Several runs from one start. `arms` maps an arm's name to its overrides; no arms: one ordinary run."""

    world: str = ""  # "mirror_grid": make the quickstart's data and model under run.dir first
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
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    cold_start: ColdStartConfig = field(default_factory=ColdStartConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)


_CHOICES: dict[str, tuple[str, ...]] = {
    "data.on_bad_row": ("error", "skip"),
    "policy.dtype": ("fp32", "bf16"),
    "policy.on_long_sequence": ("error", "own_micro_batch"),
    "policy.fp8": ("none", "e4m3", "hybrid"),
    "policy.recompute_granularity": ("none", "selective", "full"),
    "policy.head": ("fused", "recompute", "logits"),
    "optimizer.lr_decay_style": ("constant", "linear", "cosine"),
    "loss.aggregation": ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"),
    "loss.variant": ("O1", "C2"),
    "loss.kl_loss_type": ("k1", "abs", "k2", "k3", "low_var_kl"),
    "loss.scope": ("global", "microbatch", "sequence"),
}
# field -> (lowest, highest, whether the lowest itself is allowed)
_RANGES: dict[str, tuple[float, float, bool]] = {
    "run.save_interval": (0, float("inf"), True),
    "run.keep_last": (1, float("inf"), True),
    "data.rollout_max_prompt_len": (1, float("inf"), True),
    "policy.tensor_model_parallel_size": (1, float("inf"), True),
    "policy.pipeline_model_parallel_size": (1, float("inf"), True),
    "policy.virtual_pipeline_model_parallel_size": (1, float("inf"), True),
    "policy.num_layers_in_first_pipeline_stage": (0, float("inf"), True),
    "policy.num_layers_in_last_pipeline_stage": (0, float("inf"), True),
    "policy.context_parallel_size": (1, float("inf"), True),
    "policy.expert_model_parallel_size": (1, float("inf"), True),
    "policy.expert_tensor_parallel_size": (0, float("inf"), True),
    "policy.max_tokens_per_gpu": (1, float("inf"), True),
    "policy.head_workspace_mib": (1, float("inf"), True),
    "optimizer.lr": (0, float("inf"), True),
    "optimizer.min_lr": (0, float("inf"), True),
    "optimizer.lr_warmup_iters": (0, float("inf"), True),
    "optimizer.lr_decay_iters": (0, float("inf"), True),
    "optimizer.weight_decay": (0, float("inf"), True),
    "optimizer.adam_beta1": (0, 1 - 1e-9, True),
    "optimizer.adam_beta2": (0, 1 - 1e-9, True),
    "optimizer.adam_eps": (0, float("inf"), False),
    "optimizer.clip_grad": (0, float("inf"), False),
    "rollout.rollout_batch_size": (1, float("inf"), True),
    "rollout.n_samples_per_prompt": (1, float("inf"), True),
    "rollout.over_sampling_batch_size": (0, float("inf"), True),
    "rollout.rollout_max_response_len": (1, float("inf"), True),
    "rollout.rollout_temperature": (0, float("inf"), False),
    "rollout.rollout_top_p": (0, 1, False),
    "rollout.engine_batch_size": (1, float("inf"), True),
    "scoring.max_generation_rounds": (1, float("inf"), True),
    "scoring.max_staleness": (0, float("inf"), True),
    "loss.eps_clip": (0, 1, True),
    "loss.eps_clip_high": (0, float("inf"), True),
    "loss.eps_clip_c": (0, float("inf"), True),
    "loss.kl_loss_coef": (0, float("inf"), True),
    "loss.top_p_ratio": (0, 1, True),
    "loss.reweight_w": (1, float("inf"), True),
    "loss.reweight_m": (0, 1, True),
    "loss.target_entropy": (0, float("inf"), True),
    "loss.alpha": (0, float("inf"), True),
    "loss.w_max": (1, float("inf"), True),
    "loss.m_min": (0, 1, True),
    "train.num_rollout": (1, float("inf"), True),
    "train.updates_per_rollout": (1, float("inf"), True),
    "train.epochs": (1, float("inf"), True),
    "evaluation.eval_interval": (0, float("inf"), True),
    "evaluation.eval_max_response_len": (0, float("inf"), True),
    "evaluation.n_samples_per_eval_prompt": (1, float("inf"), True),
    "evaluation.eval_temperature": (0, float("inf"), False),
    "evaluation.eval_top_p": (0, 1, False),
    "cold_start.steps": (0, float("inf"), True),
    "cold_start.lr": (0, float("inf"), True),
    "cold_start.min_lr_ratio": (0, 1, True),
    "cold_start.weight_decay": (0, float("inf"), True),
    "cold_start.batch_size": (1, float("inf"), True),
}


def override(config: Config, overrides: Iterable[str]) -> Config:
    """The config with `section.field=value` strings applied, types and ranges checked.

    Raises UserError naming the nearest key for an unknown one, and the field, value and type for an ill-typed one.
    """
    tree = OmegaConf.structured(config)
    OmegaConf.set_readonly(tree, False)
    for item in overrides:
        key, separator, value = item.partition("=")
        if not separator:
            raise UserError(f"override {item!r} has no '='; write section.field=value, e.g. optimizer.lr=1e-6")
        _require_known(key)
        if value == "???":
            raise UserError(f"override {item!r}: ??? means missing; the default is {_lookup(config, key)!r}")
        if not value:
            item += "''"  # an empty text, which YAML would read as null
        try:
            tree = OmegaConf.merge(tree, OmegaConf.from_dotlist([item]))
            OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
        except (OmegaConfBaseException, YAMLError) as error:
            raise UserError(
                f"override {item!r}: {_first_line(error)}; the default is {_lookup(config, key)!r}"
            ) from None
    return _checked(tree)


def load(path: Path) -> Config:
    """A Config from a run's config.yaml."""
    try:
        tree = OmegaConf.merge(_writable_defaults(), OmegaConf.load(path))
        OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except (OmegaConfBaseException, YAMLError, OSError, UnicodeDecodeError, TypeError) as error:
        raise UserError(f"{path}: {_first_line(error)}; it must be a config.yaml written by a run") from None
    return _checked(tree)


def dump(config: Config, path: Path) -> None:
    """Write the config as YAML, readable by `load` and by `train`."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))


def differences(one: Config, other: Config) -> Iterator[tuple[str, Any, Any]]:
    """Every dotted field on which two configs differ, with both values."""
    first, second = (_flatten(dataclasses.asdict(config)) for config in (one, other))
    for key in sorted(first.keys() | second.keys()):
        if first.get(key) != second.get(key):
            yield key, first.get(key), second.get(key)


def nearest(name: str, valid: Iterable[str]) -> str:
    """`; did you mean 'x'? valid: ...` for an error message."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{hint} (valid: {', '.join(names)})"


def _writable_defaults() -> DictConfig:
    tree = OmegaConf.structured(Config())
    OmegaConf.set_readonly(tree, False)
    return tree


def _checked(tree: Any) -> Config:
    config = OmegaConf.to_object(tree)
    assert isinstance(config, Config)
    for key, choices in _CHOICES.items():
        value = _lookup(config, key)
        if value not in choices:
            raise UserError(f"{key}={value!r} is not one of {', '.join(choices)}")
    for key, (low, high, inclusive) in _RANGES.items():
        value = _lookup(config, key)
        if not (low <= value <= high) or (value == low and not inclusive) or math.isinf(value):
            bracket = "[" if inclusive else "("
            raise UserError(f"{key}={value!r} is out of range; it must lie in {bracket}{low:g}, {high:g}]")
    if config.loss.scope != "global" and config.policy.context_parallel_size > 1:
        raise UserError(
            f"loss.scope={config.loss.scope} selects inside whole sequences, which policy.context_parallel_size="
            f"{config.policy.context_parallel_size} splits; set loss.scope=global or context_parallel_size=1"
        )
    if 0 < config.loss.eps_clip_c <= 1:
        raise UserError(f"loss.eps_clip_c={config.loss.eps_clip_c!r} is out of range; it must be 0 (off) or above 1")
    return config


_FREE_FORM = ("evaluation.eval_data", "compare.arms")


def _require_known(key: str) -> None:
    """Raise for a dotted key that names no field; keys inside a free-form dict field are free."""
    valid = _flatten(dataclasses.asdict(Config()), keep_empty=True)
    section, _, name = key.rpartition(".")
    if key in valid or (section in _FREE_FORM and name):
        return
    same_field = [name for name in valid if name.split(".")[-1] == key.split(".")[-1]]
    close = same_field or difflib.get_close_matches(key, valid, n=1, cutoff=0.0)
    section = close[0].split(".")[0]
    fields = ", ".join(name.split(".", 1)[1] for name in valid if name.startswith(f"{section}."))
    raise UserError(f"unknown key {key!r}; did you mean {close[0]!r}? ({section} has: {fields})")


def _flatten(tree: Any, prefix: str = "", keep_empty: bool = False) -> dict[str, Any]:
    if not isinstance(tree, dict) or (keep_empty and not tree):
        return {prefix.rstrip("."): tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(_flatten(value, f"{prefix}{key}.", keep_empty))
    return flat


def _lookup(config: Config, key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else getattr(node, part)
    return node


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
