"""The recipes hold what the paper gives, and each has a twin that differs in its loss alone."""

from __future__ import annotations

import pytest

from megatron_stare.config import Config, OptimizerConfig, differences
from megatron_stare.planning.plan import make_plan, placements
from megatron_stare.planning.shapes import model_shape
from megatron_stare.recipes import CLUSTERS, RECIPES, cluster_of, find_recipe

# The paper's weights W and M by the size of the model.
SMALL, LARGE = (1.1, 0.9), (1.05, 0.95)
WEIGHTS = {
    "short_cot_1_5b": SMALL,
    "short_cot_7b": SMALL,
    "short_cot_14b": LARGE,
    "short_cot_32b": LARGE,
    "long_cot_1_5b": SMALL,
    "long_cot_8b": SMALL,
    "long_cot_32b": LARGE,
    "long_cot_30b_a3b": LARGE,
    "short_cot_32b_lora": LARGE,
    "long_cot_32b_lora": LARGE,
    "long_cot_30b_a3b_lora": LARGE,
    "short_cot_moonlight_16b_a3b": LARGE,
    "long_cot_glm_4_7_flash": LARGE,
    "tool_use_7b": SMALL,
    "tool_use_32b": LARGE,
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_hyperparameters_of_the_paper(name: str) -> None:
    config = find_recipe(name)
    lora = config.adapters.rank > 0  # no setting of the paper
    assert lora == name.endswith("_lora")
    assert config.optimizer == OptimizerConfig(lr=1e-5 if lora else 1e-6, adam_beta2=0.999)
    assert (config.optimizer.adam_beta1, config.optimizer.clip_grad) == (0.9, 1.0)
    rollout = config.rollout
    assert (rollout.rollout_batch_size, rollout.n_samples_per_prompt) == (64, 8)
    assert rollout.over_sampling_batch_size == 3 * rollout.rollout_batch_size
    assert rollout.dynamic_sampling and rollout.max_generation_rounds == 10
    assert (rollout.rollout_temperature, rollout.rollout_top_p) == (1.0, 1.0)
    assert config.train.num_steps_per_rollout == config.train.epochs == 1
    loss = config.loss
    assert (loss.name, loss.variant, loss.top_p_ratio, loss.target_entropy) == (
        *("stare", "O1"),
        *(0.1, 0.3),
    )
    assert (loss.reweight_w, loss.reweight_m) == WEIGHTS[name]
    assert config.evaluation.eval_top_p == 0.7 and loss.kl_loss_coef == 0
    assert rollout.engine == "sglang" and rollout.asynchrony == "on_policy"


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_model_has_the_context_that_its_recipe_asks_for(name: str) -> None:
    config = find_recipe(name)
    longest = config.longest_sequence
    assert longest <= model_shape(config.policy.hf_checkpoint).max_position_embeddings


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_baseline_differs_from_its_recipe_in_the_objective_alone(name: str) -> None:
    config, twin = find_recipe(name), find_recipe(f"{name}_grpo_ds")
    assert cluster_of(f"{name}_grpo_ds") == CLUSTERS[name]
    changed = {key: value for key, _, value in differences(config, twin)}
    if config.compare.arms:  # one cold start for both
        assert changed == {"compare.run": ["grpo_ds"]}
        assert config.compare.arms["grpo_ds"] == ["loss.name=grpo_ds"]
        return
    assert changed.pop("loss.name") == "grpo_ds"
    assert changed.pop("run.dir") == f"{config.run.dir}_grpo_ds"
    # what the baseline does not read is at its default
    plain = Config().loss
    assert all(value == getattr(plain, key.removeprefix("loss.")) for key, value in changed.items())


def test_servers_fill_the_gpus_of_the_trainer() -> None:
    """The servers that one node starts; other nodes start as many."""
    for name, cluster in CLUSTERS.items():
        servers = find_recipe(name).sglang
        here = servers.num_servers * servers.gpus_per_server
        assert cluster.rollout_gpus == 0 and servers.first_gpu is None
        assert here == min(8, cluster.trainer_gpus) and cluster.trainer_gpus % here == 0
    assert len(RECIPES) == 4 + 2 * len(CLUSTERS)


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_recipe_ships_in_the_cheaper_layout(name: str) -> None:
    """On the trainer's GPUs, and not on as many of their own, one step off."""
    config, cluster = find_recipe(name), CLUSTERS[name]
    plan, others = make_plan(config, cluster), placements(config, cluster)
    assert others and config.sglang.colocated and not plan.faults
    for other in others:
        assert other[1].rollout_gpus and plan.gpu_hours < make_plan(*other).gpu_hours
