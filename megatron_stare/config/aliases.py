"""Names of settings in other libraries, for the hint after an unknown key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches

from megatron_stare.config.errors import UserError, nearest
from megatron_stare.config.run import kind_of_values, settings
from megatron_stare.config.section import fields_of

# The key here, and its names in verl, slime, TRL, OpenRLHF and prime-rl.
_NAMES = """
adapters.alpha lora_alpha
adapters.rank lora_r lora_rank peft_config
adapters.targets target_modules
data.chat_template_kwargs apply_chat_template_kwargs enable_thinking
data.on_bad_row filter_overlong_prompts
data.prompt_data dataset dataset_name train_files
data.rollout_max_prompt_len max_prompt_length
data.shuffle shuffle_dataset
evaluation.eval_at_start eval_on_start val_before_train
evaluation.eval_data val_files
evaluation.eval_interval eval_steps eval_strategy test_freq
loss.aggregation calculate_per_token_loss loss_agg_mode
loss.eps_clip clip_range clip_ratio clip_ratio_low cliprange epsilon
loss.eps_clip_c clip_ratio_c
loss.eps_clip_high clip_ratio_high epsilon_high
loss.kl_loss_coef beta kl_beta kl_coef use_kl_loss
loss.name entropy_coef entropy_coeff importance_sampling_level loss_mode loss_type
loss.name top_entropy_quantile
mismatch.correction rollout_is rollout_rs use_tis vllm_importance_sampling_correction
mismatch.upper rollout_is_threshold tis_imp_ratio_cap
optimizer.adam_eps adam_epsilon
optimizer.clip_grad grad_clip max_grad_norm
optimizer.lr actor_lr learning_rate
optimizer.lr_decay_style lr_scheduler_type
optimizer.lr_warmup_iters lr_warmup_steps lr_warmup_steps_ratio warmup_ratio warmup_steps
policy.dtype bf16
policy.hf_checkpoint model model_name_or_path model_path
policy.max_tokens_per_gpu gradient_accumulation_steps micro_batch_size ppo_max_token_len_per_gpu
policy.max_tokens_per_gpu ppo_micro_batch_size_per_gpu use_dynamic_bsz
policy.offload_while_generating optimizer_offload param_offload
policy.packed_sequences use_remove_padding
policy.recompute_granularity gradient_checkpointing
policy.ref_hf_checkpoint ref_load
policy.ref_update_interval ref_model_sync_steps sync_ref_model
policy.routing_replay use_rollout_routing_replay
policy.tensor_model_parallel_size tensor_parallel_size
rollout.dynamic_sampling filter_groups
rollout.long_tail partial_rollout
rollout.max_staleness staleness_threshold
rollout.n_samples_per_prompt group_size n num_generations rollout_n
rollout.over_sampling_batch_size gen_batch_size generation_batch_size
rollout.rollout_batch_size batch_size per_device_train_batch_size train_batch_size
rollout.rollout_max_response_len context_length max_completion_length max_model_len max_new_tokens
rollout.rollout_max_response_len max_response_length max_tokens
rollout.rollout_temperature temperature
rollout.rollout_top_p top_p
run.dir experiment_name load log_val_generations output_dir resume_from_checkpoint resume_mode
run.dir run_name save validation_data_dir
run.keep_best metric_for_best_model
run.keep_last save_total_limit
run.logbooks logger report_to use_wandb
run.project project_name wandb_project
run.record dump_details log_completions rollout_data_dir save_debug_rollout_data
run.save_interval checkpoint_interval save_freq save_steps
scoring.advantage adv_estimator advantage_estimator
scoring.normalize_by_std disable_rewards_normalization norm_adv_by_std norm_adv_by_std_in_grpo
scoring.normalize_by_std scale_rewards
scoring.overlong_filter mask_truncated_completions
scoring.reward custom_rm_path group_rm reward_fn reward_funcs rm_type
scoring.rewards reward_weights
sglang.num_servers rollout_num_gpus
sglang.server_args gpu_memory_utilization mem_fraction_static sglang_mem_fraction_static
sglang.sync_bucket_mib update_weight_buffer_size
tools.environment tool_config_path
tools.max_turns max_assistant_turns
train.epochs num_iterations num_ppo_epochs ppo_epochs
train.num_rollout max_steps num_epoch num_epochs num_steps num_train_epochs steps total_epochs
train.num_steps_per_rollout mini_batch_size num_mini_batches ppo_mini_batch_size
train.num_steps_per_rollout steps_per_generation
"""
_LINES = (line.split() for line in _NAMES.strip().splitlines())
ALIASES = {name: key for key, *names in _LINES for name in names}


def nearest_key(key: str) -> str:
    """The key of a setting that a user most probably means by `key`; empty if none is near."""
    section, dot, name = key.rpartition(".")
    longer = [each for each in settings() if dot and each.startswith(key)]
    if name in ALIASES and not longer:
        return ALIASES[name]
    places = {each: each.rpartition(".")[::2] for each in settings()}
    own = {last: each for each, (place, last) in places.items() if place == section}
    candidates = (
        longer,
        [each for each, (_, last) in places.items() if last == name],
        get_close_matches(key, settings(), 1, 0.85),
        [ALIASES[alias] for alias in get_close_matches(name, ALIASES, 1, 0.85)],
        [own[last] for last in get_close_matches(name, own, 1, 0.45)],
        [] if own else get_close_matches(key, settings(), 1, 0.7),
    )
    return next((found[0] for found in candidates if found), "")


def setting_of_option(option: str, exact: bool = False) -> str:
    """The key of the setting that other libraries set by this option, e.g. slime's
    --rollout-batch-size; empty if none is near (`exact`: has the same name).
    """
    name = option.lstrip("-").replace("-", "_").rpartition(".")[2]
    names = [*(key.rpartition(".")[2] for key in settings()), *ALIASES]
    close = get_close_matches(name, names, n=1, cutoff=1.0 if exact else 0.8)
    return nearest_key(close[0]) if close else ""


def unknown(place: Sequence[str]) -> UserError:
    """The error for a key that names no setting: its parts, as sections or in a file."""
    key = ".".join(place)
    name = key.lstrip("+-~")
    if key in settings():  # a part with a dot, in a file
        nested = ": {".join(key.split(".")) + ": ..." + "}" * key.count(".")
        return UserError(f"key {place[-1]!r} has a dot; in a file write `{nested}`")
    of_sets = kind_of_values(name.rpartition(".")[0].rpartition(".")[0])
    if is_dataclass(of_sets):
        return UserError(f"unknown key {key!r}{nearest(place[-1], fields_of(of_sets))}")
    near = nearest_key(name)
    section = (near or name).split(".")[0]
    names = ", ".join(
        each.split(".", 1)[1] for each in settings() if each.startswith(f"{section}.")
    )
    hint = f"did you mean {near!r}?" if near else "docs/configuration.md lists all settings"
    return UserError(f"unknown key {key!r}; {hint}" + (f" ({section} has: {names})" * bool(names)))
