"""The demo: entropy collapse and its cure in minutes on a laptop CPU.

A mirror-grid walk on which two rare moves must be kept alive (scoring/mirror_grid.py). From one
cold start, GRPO-ds and STARE train on the same prompts with the same seeds. The paper's fixed
W=1.1, M=0.9 does too little at this batch size, so the STARE arm adapts them (alpha 0.05): M within
the paper's bound 0.5, W up to 2 instead of 1.5, because the critical weight that a run measures
here (critical_weight_excess in metrics.jsonl) lies between 2.1 and 2.9.
"""

from megatron_stare.config import (
    ColdStartConfig,
    CompareConfig,
    Config,
    DataConfig,
    DiagnosticsConfig,
    EvaluationConfig,
    LossConfig,
    OptimizerConfig,
    PolicyConfig,
    RolloutConfig,
    RunConfig,
    ScoringConfig,
    TrainConfig,
)

# Other arms are one override away, e.g. compare.run=[grpo_ds,stare_o1].
ARMS = {
    "grpo_ds": ["loss.name=dapo"],
    "stare": [
        "loss.name=stare",
        "loss.variant=C2",
        "loss.adaptive=true",
        "loss.alpha=0.05",
        "loss.w_max=2.0",
    ],
    "stare_fixed": [
        "loss.name=stare",
        "loss.variant=C2",
        "loss.reweight_w=1.5",
        "loss.reweight_m=0.5",
    ],
    "stare_paper": ["loss.name=stare", "loss.variant=C2"],
    "aepo": [
        "loss.name=dapo",
        "loss.eps_clip_high=0.2",
        "loss.eps_clip_c=3",
        "rollout.resampling.method=aepo",
        "rollout.resampling.target_entropy=0.3",
    ],
    "uec_rl": [
        "loss.name=dapo",
        "rollout.resampling.method=uec_rl",
        "rollout.dynamic_sampling=false",
        "rollout.max_staleness=2",
        "mismatch.old_policy=trainer",
    ],
    "stare_o1": ["loss.name=stare", "loss.variant=O1", "loss.reweight_w=2.5", "loss.w_max=2.5"],
}
ARMS |= {
    "stare_select": [*ARMS["stare"], "loss.select=sensitivity"],
    "stare_critical": [*ARMS["stare"], "loss.controller=critical"],
    "stare_both": [*ARMS["stare"], "loss.select=sensitivity", "loss.controller=critical"],
}
# Other controllers of entropy, with their published settings but for the target.
ARMS |= {
    name: [f"loss.name={name}", "loss.settings.target=0.3"]
    for name in ("entropic", "skywork_or1", "repo_r")
}


def quickstart() -> Config:
    """32 prompts x 8, T=1, one gradient step per batch, 400 steps;
    GRPO-ds against adaptive STARE C2.
    """
    return Config(
        run=RunConfig(dir="runs/quickstart", save_interval=50),
        data=DataConfig(rollout_max_prompt_len=8),
        policy=PolicyConfig(max_tokens_per_gpu=16384, packed_sequences=False),
        optimizer=OptimizerConfig(lr=1e-3, lr_warmup_iters=5, weight_decay=0.01, adam_beta2=0.999),
        rollout=RolloutConfig(
            rollout_batch_size=32,
            n_samples_per_prompt=8,
            rollout_max_response_len=25,
            max_generation_rounds=4,
            accept_partial_batch=True,
            max_staleness=0,
            skip_special_tokens=False,
        ),
        scoring=ScoringConfig(reward="mirror_grid"),
        loss=LossConfig(target_entropy=0.3),
        train=TrainConfig(num_rollout=400),
        evaluation=EvaluationConfig(eval_interval=100, n_samples_per_eval_prompt=8),
        diagnostics=DiagnosticsConfig(interval=20),
        cold_start=ColdStartConfig(steps=400, batch_size=128, lr=5e-3),
        compare=CompareConfig(world="mirror_grid", arms=ARMS, run=["grpo_ds", "stare"]),
    )
