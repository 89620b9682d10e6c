"""Names of settings in other libraries, for the hint after an unknown key."""

from __future__ import annotations

import difflib

from megatron_stare.config.errors import UserError
from megatron_stare.config.settings import settings

# What users of verl, slime, TRL, OpenRLHF and prime-rl type -> the key here.
ALIASES = {
    "actor_lr": "optimizer.lr",
    "adv_estimator": "scoring.advantage",
    "advantage_estimator": "scoring.advantage",
    "apply_chat_template_kwargs": "data.chat_template_kwargs",
    "batch_size": "rollout.rollout_batch_size",
    "beta": "loss.kl_loss_coef",
    "bf16": "policy.dtype",
    "checkpoint_interval": "run.save_interval",
    "clip_range": "loss.eps_clip",
    "clip_ratio": "loss.eps_clip",
    "clip_ratio_c": "loss.eps_clip_c",
    "clip_ratio_high": "loss.eps_clip_high",
    "clip_ratio_low": "loss.eps_clip",
    "cliprange": "loss.eps_clip",
    "dataset": "data.prompt_data",
    "dataset_name": "data.prompt_data",
    "enable_thinking": "data.chat_template_kwargs",
    "epsilon": "loss.eps_clip",
    "epsilon_high": "loss.eps_clip_high",
    "eval_on_start": "evaluation.eval_at_start",
    "eval_steps": "evaluation.eval_interval",
    "grad_clip": "optimizer.clip_grad",
    "group_size": "rollout.n_samples_per_prompt",
    "kl_beta": "loss.kl_loss_coef",
    "kl_coef": "loss.kl_loss_coef",
    "learning_rate": "optimizer.lr",
    "logger": "run.logbooks",
    "log_completions": "run.record",
    "loss_agg_mode": "loss.aggregation",
    "loss_mode": "loss.name",
    "loss_type": "loss.name",
    "lr_scheduler_type": "optimizer.lr_decay_style",
    "max_completion_length": "rollout.rollout_max_response_len",
    "max_grad_norm": "optimizer.clip_grad",
    "max_new_tokens": "rollout.rollout_max_response_len",
    "max_prompt_length": "data.rollout_max_prompt_len",
    "max_response_length": "rollout.rollout_max_response_len",
    "max_steps": "train.num_rollout",
    "max_tokens": "rollout.rollout_max_response_len",
    "mini_batch_size": "train.num_steps_per_rollout",
    "model": "policy.hf_checkpoint",
    "model_name_or_path": "policy.hf_checkpoint",
    "model_path": "policy.hf_checkpoint",
    "n": "rollout.n_samples_per_prompt",
    "num_epoch": "train.num_rollout",
    "num_epochs": "train.num_rollout",
    "num_generations": "rollout.n_samples_per_prompt",
    "num_iterations": "train.epochs",
    "num_steps": "train.num_rollout",
    "num_train_epochs": "train.num_rollout",
    "output_dir": "run.dir",
    "partial_rollout": "rollout.long_tail",
    "per_device_train_batch_size": "rollout.rollout_batch_size",
    "ppo_epochs": "train.epochs",
    "ppo_max_token_len_per_gpu": "policy.max_tokens_per_gpu",
    "ppo_mini_batch_size": "train.num_steps_per_rollout",
    "ref_load": "policy.ref_hf_checkpoint",
    "report_to": "run.logbooks",
    "reward_fn": "scoring.reward",
    "reward_funcs": "scoring.reward",
    "rm_type": "scoring.reward",
    "rollout_n": "rollout.n_samples_per_prompt",
    "save": "run.dir",
    "save_freq": "run.save_interval",
    "save_steps": "run.save_interval",
    "steps": "train.num_rollout",
    "temperature": "rollout.rollout_temperature",
    "test_freq": "evaluation.eval_interval",
    "top_p": "rollout.rollout_top_p",
    "total_epochs": "train.num_rollout",
    "train_batch_size": "rollout.rollout_batch_size",
    "train_files": "data.prompt_data",
    "val_before_train": "evaluation.eval_at_start",
    "val_files": "evaluation.eval_data",
    "warmup_steps": "optimizer.lr_warmup_iters",
}


def nearest_key(key: str) -> str:
    """The key of a setting that a user most probably means by `key`."""
    known, name = settings(), key.rpartition(".")[2]
    longer = [each for each in known if "." in key and each.startswith(key)]
    alias = difflib.get_close_matches(name, ALIASES, n=1, cutoff=0.85)
    same = [each for each in known if each.rpartition(".")[2] == name]
    if longer or (same and name not in ALIASES):
        return (longer or same)[0]
    near = [] if name in ALIASES else difflib.get_close_matches(key, known, n=1, cutoff=0.85)
    if alias and not near:
        return ALIASES[alias[0]]
    return (near or difflib.get_close_matches(key, known, n=1, cutoff=0.0))[0]


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
    near = nearest_key(key.lstrip("+-~"))
    section = near.split(".")[0]
    names = ", ".join(
        each.split(".", 1)[1] for each in settings() if each.startswith(f"{section}.")
    )
    return UserError(f"unknown key {key!r}; did you mean {near!r}? ({section} has: {names})")
