"""Which values a field may have: what a type alone does not say."""

from __future__ import annotations

import math
from typing import Any

from megatron_stare.config.errors import UserError
from megatron_stare.config.stages import Config, EvaluationConfig
from megatron_stare.config.training import PolicyConfig

CHOICES: dict[str, tuple[str, ...]] = {
    "data.on_bad_row": ("error", "skip"),
    "data.deduplicate": ("none", "exact", "normalised"),
    "policy.dtype": ("fp32", "bf16"),
    "policy.on_long_sequence": ("error", "own_micro_batch"),
    "policy.fp8": ("none", "e4m3", "hybrid"),
    "policy.recompute_granularity": ("none", "selective", "full"),
    "policy.tuning.fp8_recipe": ("delayed", "tensorwise", "blockwise", "mxfp8"),
    "policy.routing_replay": ("none", "rollout", "old_policy"),
    "policy.expert_quantization": ("none", "fp8"),
    "policy.head": ("fused", "recompute", "logits"),
    "rollout.engine": ("embedded", "sglang"),
    "rollout.dynamic_sampling_metric": ("accuracy", "reward"),
    "run.record": ("none", "replayable", "all"),
    "rollout.resampling.method": ("none", "aepo", "uec_rl"),
    "rollout.asynchrony": ("on_policy", "one_step_off", "fully_async"),
    "sandbox.isolation": ("auto", "bubblewrap", "limits"),
    "sglang.sync_method": ("broadcast", "tensor", "disk", "delta"),
    "optimizer.lr_decay_style": ("constant", "linear", "cosine"),
    "scoring.shaping": ("none", "signed", "retool"),
    "scoring.extraction": ("boxed", "answer", "tag", "any"),
    "scoring.require_evaluated": ("auto", "always", "never"),
    "scoring.language": (
        *("latin", "han", "japanese", "hangul", "cyrillic", "greek"),
        *("arabic", "hebrew", "devanagari", "thai"),
    ),
    "loss.aggregation": (
        *("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"),
        *("seq-mean-token-sum-norm", "row-mean"),
    ),
    "loss.variant": ("O1", "C2"),
    "loss.reweight": ("none", "stare"),
    "loss.select": ("surprisal", "sensitivity"),
    "loss.controller": ("bang_bang", "critical"),
    "loss.kl_loss_type": ("k1", "abs", "k2", "k3", "low_var_kl"),
    "tools.format": ("hermes", "qwen3_coder", "code"),
    "mismatch.old_policy": ("auto", "trainer", "rollout"),
    "mismatch.correction": (
        "none",
        "token_tis",
        "sequence_tis",
        "token_mis",
        "sequence_mis",
        "icepop",
        "geo_rs",
    ),
    "mismatch.on_alarm": ("stop", "mask"),
    "mismatch.rejected": ("zero", "drop"),
    "mismatch.accepted": ("ratio", "one"),
    "loss.scope": ("global", "microbatch", "sequence"),
}
ALARMS = (
    *("entropy", "gradient", "mismatch", "length"),
    *("format", "repeated", "reward", "nonfinite"),
)
LOGBOOKS = ("tensorboard", "wandb", "mlflow")
RECOMPUTED = ("core_attn", "layernorm", "mlp", "moe", "moe_act")
# field -> (lowest, highest, whether the lowest itself is allowed)
RANGES: dict[str, tuple[float, float, bool]] = {
    "run.save_interval": (0, float("inf"), True),
    "run.keep_last": (1, float("inf"), True),
    "run.keep_every": (0, float("inf"), True),
    "run.hang_timeout": (0, float("inf"), True),
    "run.prometheus_port": (0, 65535, True),
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
    "policy.moe_aux_loss_coeff": (0, float("inf"), True),
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
    "rollout.resampling.target_entropy": (0, float("inf"), True),
    "rollout.resampling.high_temperature": (0, float("inf"), False),
    "rollout.resampling.low_temperature": (0, float("inf"), False),
    "rollout.resampling.prompt_share": (0, 1, False),
    "rollout.resampling.min_advantage": (0, float("inf"), True),
    "rollout.resampling.max_rollouts": (1, float("inf"), True),
    "rollout.resampling.temperature": (0, float("inf"), False),
    "rollout.resampling.samples": (2, float("inf"), True),
    "rollout.resampling.min_again": (0, float("inf"), True),
    "rollout.resampling.replay_interval": (0, float("inf"), True),
    "rollout.resampling.replay_batches": (1, float("inf"), True),
    "rollout.resampling.replay_advantage": (0, float("inf"), True),
    "rollout.engine_batch_size": (1, float("inf"), True),
    "rollout.workers_per_node": (-1, 64, True),
    "sglang.num_servers": (1, float("inf"), True),
    "sglang.gpus_per_server": (1, float("inf"), True),
    "sglang.first_gpu": (0, float("inf"), True),
    "sglang.port": (0, 65535, True),
    "sglang.start_timeout": (0, float("inf"), False),
    "sglang.max_restarts": (0, float("inf"), True),
    "sglang.restart_backoff": (0, 60, True),
    "sglang.max_concurrency": (1, float("inf"), True),
    "sglang.request_timeout": (0, float("inf"), False),
    "sglang.stream_interval": (0, float("inf"), True),
    "sglang.max_attempts": (1, float("inf"), True),
    "sglang.health_interval": (0, float("inf"), False),
    "sglang.health_timeout": (0, float("inf"), False),
    "sglang.sync_bucket_mib": (1, float("inf"), True),
    "sglang.sync_timeout": (0, float("inf"), False),
    "sglang.full_sync_interval": (0, float("inf"), True),
    "sandbox.max_concurrency": (1, float("inf"), True),
    "sandbox.warm_workers": (0, float("inf"), True),
    "sandbox.wall_seconds": (0, float("inf"), False),
    "sandbox.cpu_seconds": (0, float("inf"), False),
    "sandbox.memory_mib": (64, float("inf"), True),
    "sandbox.max_sessions": (1, float("inf"), True),
    "sandbox.max_processes": (1, float("inf"), True),
    "sandbox.file_mib": (1, float("inf"), True),
    "sandbox.disk_mib": (1, float("inf"), True),
    "sandbox.open_files": (16, float("inf"), True),
    "sandbox.output_bytes": (1, float("inf"), True),
    "sandbox.start_timeout": (0, float("inf"), False),
    "sandbox.max_attempts": (1, float("inf"), True),
    "scoring.numeric_tolerance": (0, 1, True),
    "scoring.overlong_buffer_len": (0, float("inf"), True),
    "scoring.overlong_penalty_factor": (0, float("inf"), True),
    "scoring.remote_timeout": (0, float("inf"), False),
    "scoring.remote_attempts": (1, float("inf"), True),
    "scoring.remote_concurrency": (1, float("inf"), True),
    "scoring.code_seconds": (0, float("inf"), False),
    "scoring.code_output_bytes": (0, float("inf"), True),
    "scoring.verifier_processes": (0, float("inf"), True),
    "scoring.verifier_timeout": (0, float("inf"), False),
    "scoring.verifier_memory_mib": (0, float("inf"), True),
    "rollout.max_generation_rounds": (1, float("inf"), True),
    "rollout.max_staleness": (-1, float("inf"), True),
    "loss.eps_clip": (0, 1, True),
    "loss.eps_clip_high": (0, float("inf"), True),
    "loss.eps_clip_c": (0, float("inf"), True),
    "loss.padded_length": (1, float("inf"), True),
    "loss.kl_loss_coef": (0, float("inf"), True),
    "loss.top_p_ratio": (0, 1, True),
    "loss.reweight_w": (1, float("inf"), True),
    "loss.reweight_m": (0, 1, True),
    "loss.target_entropy": (0, float("inf"), True),
    "loss.alpha": (0, float("inf"), True),
    "loss.w_max": (1, float("inf"), True),
    "loss.m_min": (0, 1, True),
    "tools.max_turns": (1, float("inf"), True),
    "tools.max_calls": (1, float("inf"), True),
    "tools.call_seconds": (0, float("inf"), False),
    "tools.episode_seconds": (0, float("inf"), False),
    "tools.max_seconds": (0, float("inf"), False),
    "tools.output_characters": (100, float("inf"), True),
    "mismatch.lower": (0, float("inf"), True),
    "mismatch.upper": (0, float("inf"), True),
    "mismatch.alarm": (0, float("inf"), True),
    "mismatch.parity_before": (0, 1 << 20, True),
    "train.num_rollout": (1, float("inf"), True),
    "train.num_steps_per_rollout": (1, float("inf"), True),
    "train.max_nonfinite_steps": (1, float("inf"), True),
    "train.epochs": (1, float("inf"), True),
    "evaluation.eval_interval": (0, float("inf"), True),
    "evaluation.eval_max_response_len": (0, float("inf"), True),
    "evaluation.n_samples_per_eval_prompt": (1, float("inf"), True),
    "evaluation.eval_temperature": (0, float("inf"), True),
    "evaluation.eval_top_p": (0, 1, False),
    "evaluation.eval_top_k": (0, float("inf"), True),
    "diagnostics.interval": (0, float("inf"), True),
    "diagnostics.rollouts": (0, float("inf"), True),
    "diagnostics.tokens": (0, float("inf"), True),
    "alarms.patience": (1, float("inf"), True),
    "alarms.window": (2, float("inf"), True),
    "alarms.entropy_low": (0, 1, True),
    "alarms.entropy_high": (0, float("inf"), True),
    "alarms.gradient": (0, float("inf"), True),
    "alarms.mismatch": (0, float("inf"), True),
    "alarms.length": (0, float("inf"), True),
    "alarms.format": (0, 1, True),
    "alarms.repeated": (0, 1, True),
    "alarms.reward": (0, 1, True),
    "cold_start.steps": (0, float("inf"), True),
    "cold_start.lr": (0, float("inf"), True),
    "cold_start.min_lr_ratio": (0, 1, True),
    "cold_start.weight_decay": (0, float("inf"), True),
    "cold_start.batch_size": (1, float("inf"), True),
}
# Fields that may be unset.
OPTIONAL = (
    *("loss.eps_clip", "loss.eps_clip_high", "loss.eps_clip_c"),
    *("loss.aggregation", "loss.padded_length"),
    *("policy.head_workspace_mib", "policy.tuning.fp8_recipe"),
)
# The same of one set's own settings, where they are set.
SET_RANGES: dict[str, tuple[float, float, bool]] = {
    "n_samples": (1, float("inf"), True),
    "temperature": (0, float("inf"), True),
    "top_p": (0, 1, False),
    "top_k": (0, float("inf"), True),
    "max_response_len": (1, float("inf"), True),
}


def check(config: Config) -> None:
    """UserError, naming field, value and remedy, for a value that no run can work with."""
    for key, choices in CHOICES.items():
        value = lookup(config, key)
        if value not in choices and not (value is None and key in OPTIONAL):
            raise UserError(f"{key}={value!r} is not one of {', '.join(choices)}")
    for key, bounds in RANGES.items():
        value = lookup(config, key)
        if value is not None or key not in OPTIONAL:
            _check_range(key, value, *bounds)
    if config.loss.scope != "global" and config.policy.context_parallel_size > 1:
        raise UserError(
            f"loss.scope={config.loss.scope} selects inside whole sequences, which "
            f"policy.context_parallel_size={config.policy.context_parallel_size} splits; set "
            "loss.scope=global or context_parallel_size=1"
        )
    if config.loss.eps_clip_c is not None and 0 < config.loss.eps_clip_c <= 1:
        raise UserError(
            f"loss.eps_clip_c={config.loss.eps_clip_c!r} is out of range; it must be 0 (off) or "
            "above 1"
        )
    if config.policy.expert_quantization != "none" and config.policy.dtype != "bf16":
        raise UserError(
            f"policy.expert_quantization={config.policy.expert_quantization} needs policy.dtype="
            f"bf16, whose fp32 copies keep what rounding takes, not {config.policy.dtype}"
        )
    _check_recomputation(config.policy)
    _check_asynchrony(config)
    _check_evaluation(config.evaluation)
    for name in config.run.logbooks:
        if name not in LOGBOOKS:
            raise UserError(f"run.logbooks has {name!r}, which is none of {', '.join(LOGBOOKS)}")
    for name in config.alarms.stop:
        if name not in ALARMS:
            raise UserError(f"alarms.stop has {name!r}, which is none of {', '.join(ALARMS)}")
    for source, weight in config.data.sources.items():
        if not (math.isfinite(weight) and weight > 0):
            raise UserError(
                f"data.sources has {source}: {weight!r}; a weight must be a number above 0"
            )
    if config.data.sources and config.data.prompt_data:
        raise UserError(
            f"data.prompt_data={config.data.prompt_data!r} and data.sources are both set; keep one "
            "of them"
        )
    if config.mismatch.old_policy == "rollout" and config.mismatch.correction != "none":
        raise UserError(
            f"mismatch.correction={config.mismatch.correction} and mismatch.old_policy=rollout "
            "would make up for the same difference twice; set one of them back"
        )
    for name, weight in config.scoring.rewards.items():
        if not math.isfinite(weight):
            raise UserError(
                f"scoring.rewards has {name}={weight!r}; a weight must be a finite number"
            )
    _check_servers(config)
    _check_sandbox(config)


def _check_range(key: str, value: float, low: float, high: float, inclusive: bool) -> None:
    if not (low <= value <= high) or (value == low and not inclusive) or math.isinf(value):
        bracket = "[" if inclusive else "("
        raise UserError(
            f"{key}={value!r} is out of range; it must lie in {bracket}{low:g}, {high:g}]"
        )


def _check_sandbox(config: Config) -> None:
    sandbox = config.sandbox
    if sandbox.url and not sandbox.url.startswith(("http://", "https://")):
        raise UserError(f"sandbox.url={sandbox.url!r} is no address; write http://host:port")
    if sandbox.url and sandbox.stateful:
        raise UserError(
            f"sandbox.stateful=true cannot be had from sandbox.url={sandbox.url}, which forgets "
            "every call; set stateful=false, or leave url empty"
        )


def _check_servers(config: Config) -> None:
    servers = config.sglang
    addresses = {"urls": servers.urls, "router_url": [servers.router_url]}
    for key, urls in (addresses | {"mirrors": servers.mirrors}).items():
        for url in filter(None, urls):
            if not url.startswith(("http://", "https://")):
                raise UserError(
                    f"sglang.{key} has {url!r}, which is no address; write http://host:port"
                )
    if servers.sync_method == "delta" and not servers.mirrors:
        raise UserError(
            "sglang.sync_method=delta needs sglang.mirrors; start one beside the servers (python "
            "-m megatron_stare mirror DIRECTORY), and name it: 'sglang.mirrors=[http://host:31000]'"
        )
    if config.sglang.colocated and config.sglang.sync_method == "broadcast":
        raise UserError(
            "sglang.sync_method=broadcast needs GPUs of its own on either side, and "
            "sglang.colocated=true shares them; set sglang.sync_method=tensor, which then hands "
            "over memory, or disk"
        )
    if config.sglang.colocated and config.rollout.asynchrony != "on_policy":
        raise UserError(
            f"rollout.asynchrony={config.rollout.asynchrony} generates while it trains, and "
            "sglang.colocated=true has memory for one of them; set rollout.asynchrony=on_policy or "
            "sglang.colocated=false"
        )


def _check_recomputation(policy: PolicyConfig) -> None:
    modules = policy.recompute_modules
    for name in modules.split(","):
        if name.strip() not in RECOMPUTED:
            raise UserError(
                f"policy.recompute_modules has {name.strip()!r}, which is none of "
                f"{', '.join(RECOMPUTED)}"
            )
    if policy.recompute_granularity != "selective" and modules != PolicyConfig().recompute_modules:
        raise UserError(
            f"policy.recompute_modules={modules} is for policy.recompute_granularity=selective, "
            f"not {policy.recompute_granularity}; set that, or leave recompute_modules out"
        )


def _check_asynchrony(config: Config) -> None:
    rollout, staleness = config.rollout, config.rollout.staleness_limit
    if rollout.asynchrony != "on_policy" and staleness < 1:
        raise UserError(
            f"rollout.asynchrony={rollout.asynchrony} trains on rollouts of older weights, which "
            f"rollout.max_staleness={staleness} drops; set it to 1 or more"
        )
    if rollout.abort_long_tail and rollout.asynchrony != "on_policy":
        raise UserError(
            "rollout.abort_long_tail=true is for on_policy; with "
            f"rollout.asynchrony={rollout.asynchrony} the long tail holds nobody up; set it to "
            "false"
        )
    if rollout.abort_long_tail and rollout.over_sampling_batch_size <= rollout.rollout_batch_size:
        raise UserError(
            "rollout.abort_long_tail=true needs "
            f"rollout.over_sampling_batch_size={rollout.over_sampling_batch_size} above "
            f"rollout_batch_size={rollout.rollout_batch_size}; raise it"
        )
    if rollout.abort_long_tail and rollout.partial_rollout and staleness < 1:
        raise UserError(
            "rollout.partial_rollout=true goes on with parts that older weights sampled, which "
            "rollout.max_staleness=0 drops; set max_staleness=1 or partial_rollout=false"
        )


def _check_evaluation(evaluation: EvaluationConfig) -> None:
    for name, settings in evaluation.per_set.items():
        if name not in evaluation.eval_data:
            known = ", ".join(evaluation.eval_data) or "none"
            raise UserError(
                f"evaluation.per_set has {name!r}, which is no set of evaluation.eval_data "
                f"({known})"
            )
        for key, value in vars(settings).items():
            if value is not None:
                _check_range(f"evaluation.per_set.{name}.{key}", value, *SET_RANGES[key])
    if not all(word.strip() for word in evaluation.reflection_words):
        raise UserError("evaluation.reflection_words has an empty word; leave it out")


def lookup(config: Config, key: str) -> Any:
    """The value of a dotted key; None where a free name in between is not there yet."""
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else getattr(node, part, None)
    return node
