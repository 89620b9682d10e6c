"""Names of settings in other libraries, for the hint after an unknown key."""

from __future__ import annotations

import difflib

from megatron_stare.config.errors import UserError
from megatron_stare.config.settings import settings

# Names of verl, slime, TRL, OpenRLHF and prime-rl -> the key here.
ALIASES = {
    "actor_lr": "optimizer.lr",
    "adam_epsilon": "optimizer.adam_eps",
    "adv_estimator": "scoring.advantage",
    "advantage_estimator": "scoring.advantage",
    "apply_chat_template_kwargs": "data.chat_template_kwargs",
    "batch_size": "rollout.rollout_batch_size",
    "beta": "loss.kl_loss_coef",
    "bf16": "policy.dtype",
    "calculate_per_token_loss": "loss.aggregation",
    "checkpoint_interval": "run.save_interval",
    "clip_range": "loss.eps_clip",
    "clip_ratio": "loss.eps_clip",
    "clip_ratio_c": "loss.eps_clip_c",
    "clip_ratio_high": "loss.eps_clip_high",
    "clip_ratio_low": "loss.eps_clip",
    "cliprange": "loss.eps_clip",
    "context_length": "rollout.rollout_max_response_len",
    "custom_rm_path": "scoring.reward",
    "dataset": "data.prompt_data",
    "dataset_name": "data.prompt_data",
    "disable_rewards_normalization": "scoring.normalize_by_std",
    "dump_details": "run.record",
    "enable_thinking": "data.chat_template_kwargs",
    "entropy_coef": "loss.name",
    "entropy_coeff": "loss.name",
    "epsilon": "loss.eps_clip",
    "epsilon_high": "loss.eps_clip_high",
    "eval_on_start": "evaluation.eval_at_start",
    "eval_steps": "evaluation.eval_interval",
    "eval_strategy": "evaluation.eval_interval",
    "experiment_name": "run.dir",
    "filter_groups": "rollout.dynamic_sampling",
    "filter_overlong_prompts": "data.on_bad_row",
    "gen_batch_size": "rollout.over_sampling_batch_size",
    "generation_batch_size": "rollout.over_sampling_batch_size",
    "gpu_memory_utilization": "sglang.server_args",
    "grad_clip": "optimizer.clip_grad",
    "gradient_accumulation_steps": "policy.max_tokens_per_gpu",
    "gradient_checkpointing": "policy.recompute_granularity",
    "group_rm": "scoring.reward",
    "group_size": "rollout.n_samples_per_prompt",
    "importance_sampling_level": "loss.name",
    "kl_beta": "loss.kl_loss_coef",
    "kl_coef": "loss.kl_loss_coef",
    "learning_rate": "optimizer.lr",
    "load": "run.dir",
    "log_completions": "run.record",
    "log_val_generations": "run.dir",
    "logger": "run.logbooks",
    "lora_alpha": "adapters.alpha",
    "lora_r": "adapters.rank",
    "lora_rank": "adapters.rank",
    "loss_agg_mode": "loss.aggregation",
    "loss_mode": "loss.name",
    "loss_type": "loss.name",
    "lr_scheduler_type": "optimizer.lr_decay_style",
    "lr_warmup_steps": "optimizer.lr_warmup_iters",
    "lr_warmup_steps_ratio": "optimizer.lr_warmup_iters",
    "mask_truncated_completions": "scoring.overlong_filter",
    "max_assistant_turns": "tools.max_turns",
    "max_completion_length": "rollout.rollout_max_response_len",
    "max_grad_norm": "optimizer.clip_grad",
    "max_model_len": "rollout.rollout_max_response_len",
    "max_new_tokens": "rollout.rollout_max_response_len",
    "max_prompt_length": "data.rollout_max_prompt_len",
    "max_response_length": "rollout.rollout_max_response_len",
    "max_steps": "train.num_rollout",
    "max_tokens": "rollout.rollout_max_response_len",
    "mem_fraction_static": "sglang.server_args",
    "metric_for_best_model": "run.keep_best",
    "micro_batch_size": "policy.max_tokens_per_gpu",
    "mini_batch_size": "train.num_steps_per_rollout",
    "model": "policy.hf_checkpoint",
    "model_name_or_path": "policy.hf_checkpoint",
    "model_path": "policy.hf_checkpoint",
    "n": "rollout.n_samples_per_prompt",
    "norm_adv_by_std": "scoring.normalize_by_std",
    "norm_adv_by_std_in_grpo": "scoring.normalize_by_std",
    "num_epoch": "train.num_rollout",
    "num_epochs": "train.num_rollout",
    "num_generations": "rollout.n_samples_per_prompt",
    "num_iterations": "train.epochs",
    "num_mini_batches": "train.num_steps_per_rollout",
    "num_ppo_epochs": "train.epochs",
    "num_steps": "train.num_rollout",
    "num_train_epochs": "train.num_rollout",
    "optimizer_offload": "policy.offload_while_generating",
    "output_dir": "run.dir",
    "param_offload": "policy.offload_while_generating",
    "partial_rollout": "rollout.long_tail",
    "peft_config": "adapters.rank",
    "per_device_train_batch_size": "rollout.rollout_batch_size",
    "ppo_epochs": "train.epochs",
    "ppo_max_token_len_per_gpu": "policy.max_tokens_per_gpu",
    "ppo_micro_batch_size_per_gpu": "policy.max_tokens_per_gpu",
    "ppo_mini_batch_size": "train.num_steps_per_rollout",
    "project_name": "run.project",
    "ref_load": "policy.ref_hf_checkpoint",
    "ref_model_sync_steps": "policy.ref_update_interval",
    "report_to": "run.logbooks",
    "resume_from_checkpoint": "run.dir",
    "resume_mode": "run.dir",
    "reward_fn": "scoring.reward",
    "reward_funcs": "scoring.reward",
    "reward_weights": "scoring.rewards",
    "rm_type": "scoring.reward",
    "rollout_data_dir": "run.record",
    "rollout_is": "mismatch.correction",
    "rollout_is_threshold": "mismatch.upper",
    "rollout_n": "rollout.n_samples_per_prompt",
    "rollout_num_gpus": "sglang.num_servers",
    "rollout_rs": "mismatch.correction",
    "run_name": "run.dir",
    "save": "run.dir",
    "save_debug_rollout_data": "run.record",
    "save_freq": "run.save_interval",
    "save_steps": "run.save_interval",
    "save_total_limit": "run.keep_last",
    "scale_rewards": "scoring.normalize_by_std",
    "sglang_mem_fraction_static": "sglang.server_args",
    "shuffle_dataset": "data.shuffle",
    "staleness_threshold": "rollout.max_staleness",
    "steps": "train.num_rollout",
    "steps_per_generation": "train.num_steps_per_rollout",
    "sync_ref_model": "policy.ref_update_interval",
    "target_modules": "adapters.targets",
    "temperature": "rollout.rollout_temperature",
    "tensor_parallel_size": "policy.tensor_model_parallel_size",
    "test_freq": "evaluation.eval_interval",
    "tis_imp_ratio_cap": "mismatch.upper",
    "tool_config_path": "tools.environment",
    "top_entropy_quantile": "loss.name",
    "top_p": "rollout.rollout_top_p",
    "total_epochs": "train.num_rollout",
    "train_batch_size": "rollout.rollout_batch_size",
    "train_files": "data.prompt_data",
    "update_weight_buffer_size": "sglang.sync_bucket_mib",
    "use_dynamic_bsz": "policy.max_tokens_per_gpu",
    "use_kl_loss": "loss.kl_loss_coef",
    "use_remove_padding": "policy.packed_sequences",
    "use_rollout_routing_replay": "policy.routing_replay",
    "use_tis": "mismatch.correction",
    "use_wandb": "run.logbooks",
    "val_before_train": "evaluation.eval_at_start",
    "val_files": "evaluation.eval_data",
    "validation_data_dir": "run.dir",
    "vllm_importance_sampling_correction": "mismatch.correction",
    "wandb_project": "run.project",
    "warmup_ratio": "optimizer.lr_warmup_iters",
    "warmup_steps": "optimizer.lr_warmup_iters",
}


def nearest_key(key: str) -> str:
    """The key of a setting that a user most probably means by `key`; empty if none is near."""
    known, name = settings(), key.rpartition(".")[2]
    longer = [each for each in known if "." in key and each.startswith(key)]
    alias = difflib.get_close_matches(name, ALIASES, n=1, cutoff=0.85)
    same = [each for each in known if each.rpartition(".")[2] == name]
    if longer or (same and name not in ALIASES):
        return (longer or same)[0]
    near = [] if name in ALIASES else difflib.get_close_matches(key, known, n=1, cutoff=0.85)
    if alias and not near:
        return ALIASES[alias[0]]
    if not near:
        section = key.rpartition(".")[0]
        own = [each.rpartition(".")[2] for each in known if each.rpartition(".")[0] == section]
        here = difflib.get_close_matches(name, own, n=1, cutoff=0.45)
        there = [] if own else difflib.get_close_matches(key, known, n=1, cutoff=0.7)
        near = [f"{section}.{each}" for each in here] or there
    return near[0] if near else ""


def setting_of_option(option: str, exact: bool = False) -> str:
    """The key of the setting that other libraries set by this option, e.g. slime's
    --rollout-batch-size; empty if none is near (`exact`: has the same name).
    """
    name = option.lstrip("-").replace("-", "_").rpartition(".")[2]
    names = [*(key.rpartition(".")[2] for key in settings()), *ALIASES]
    close = difflib.get_close_matches(name, names, n=1, cutoff=1.0 if exact else 0.8)
    return nearest_key(close[0]) if close else ""


def unknown(key: str) -> UserError:
    """The error for a key that names no setting."""
    name = key.lstrip("+-~")
    near = nearest_key(name)
    section = (near or name).split(".")[0]
    names = ", ".join(
        each.split(".", 1)[1] for each in settings() if each.startswith(f"{section}.")
    )
    hint = f"did you mean {near!r}?" if near else "docs/configuration.md lists all settings"
    return UserError(f"unknown key {key!r}; {hint}" + (f" ({section} has: {names})" * bool(names)))
