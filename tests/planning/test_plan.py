"""Plans of the recipes fit; what does not fit says why and what to do."""

from __future__ import annotations

import math

import pytest

from megatron_stare.config import Config, UserError, override
from megatron_stare.planning.machine import H100
from megatron_stare.planning.memory import WHOLE_LOGIT, model_bytes, served_bytes
from megatron_stare.planning.plan import RunPlan, make_plan
from megatron_stare.planning.serving import scheduled, spread
from megatron_stare.planning.tables import plan_text, work_rows
from megatron_stare.policy.huggingface.fp8_weights import block_matrices
from megatron_stare.policy.huggingface.names import name_table
from megatron_stare.policy.huggingface.shape import shape_of
from megatron_stare.recipes import RECIPES, Cluster, cluster_of, find_recipe
from tests.tiny_models import tiny_config


def planned(name: str, *overrides: str, cluster: Cluster | None = None) -> RunPlan:
    its = cluster or cluster_of(name)
    assert its is not None
    return make_plan(override(find_recipe(name), overrides), its)


@pytest.mark.parametrize("name", [name for name in RECIPES if cluster_of(name)])
def test_every_recipe_fits_its_gpus(name: str) -> None:
    plan = planned(name)
    assert not plan.faults
    assert plan.config.longest_sequence <= plan.config.policy.sequence_budget
    assert plan.serving is not None and plan.serving.concurrency >= 8
    assert 0.1 < plan.mfu < 0.6 and plan.seconds > plan.training.seconds


APART = (
    "sglang.colocated=false",
    "sglang.sync_method=broadcast",
    "policy.offload_while_generating=false",
)
HALVES = Cluster(4, 4)  # short_cot_7b with servers on GPUs of their own


LONG_ALONE = "policy.on_long_sequence=own_micro_batch"
REFUSED = {
    "activations": ("long_cot_32b", ("policy.max_tokens_per_gpu=33792",), "activations"),
    "optimizer": ("short_cot_7b", ("policy.use_distributed_optimizer=false",), "optimizer state"),
    "embedded": ("short_cot_32b", ("rollout.engine=embedded",), "set rollout.engine=sglang"),
    "colocated": (
        "short_cot_32b",
        ("policy.offload_while_generating=false", "sglang.gpus_per_server=1"),
        "policy.offload_while_generating=true",
    ),
    "memory fraction": (
        "short_cot_7b",
        ("sglang.server_args=--mem-fraction-static 0.85",),
        "a colocated server holds 63.3 GiB, and the trainer keeps 10.4 GiB of 70.0 GiB",
    ),
    "length": ("long_cot_32b", ("policy.max_tokens_per_gpu=8447",), "33,792 tokens is longer"),
    "own length": (
        "long_cot_32b",
        ("policy.max_tokens_per_gpu=1024", LONG_ALONE, "policy.context_parallel_size=1"),
        "activations",
    ),
    "server": ("tool_use_32b", ("sglang.gpus_per_server=1",), "raise sglang.gpus_per_server"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_plan_that_does_not_fit_names_the_reason(case: str) -> None:
    name, overrides, words = REFUSED[case]
    plan = planned(name, *overrides)
    assert any(words in fault for fault in plan.faults), plan.faults
    assert "does not fit: " in plan_text(name, plan)


def test_free_trainer_memory_makes_a_colocated_run_fit() -> None:
    colocated = ("sglang.colocated=true", "sglang.sync_method=tensor")
    cluster = Cluster(trainer_gpus=8, rollout_gpus=0)
    stays = "policy.offload_while_generating=false"
    tight = planned("short_cot_14b", *colocated, stays, cluster=cluster)
    roomy = planned(
        "short_cot_14b", *colocated, "policy.offload_while_generating=true", cluster=cluster
    )
    assert roomy.worst.generating < tight.worst.generating and not roomy.faults
    assert roomy.serving and tight.serving and roomy.serving.cache > tight.serving.cache
    for plan in (roomy, tight):
        assert plan.serving
        left = H100.usable_bytes - H100.server_bytes - plan.worst.generating
        taken = plan.serving.cache + plan.serving.weights
        assert left - 0.01 * H100.memory_bytes < taken <= left, "to a hundredth of the GPU"


def test_a_colocated_run_pays_for_the_trainers_gpus_alone() -> None:
    colocated = ("sglang.colocated=true", "sglang.sync_method=tensor")
    colocated += ("policy.offload_while_generating=true",)
    both, alone = (
        planned("long_cot_32b", *colocated, cluster=Cluster(64, rollout)) for rollout in (32, 0)
    )
    assert both.cluster.gpus == 64 and both.gpu_hours == alone.gpu_hours


def test_the_whole_memory_is_the_sum_of_its_parts() -> None:
    """A rank of 14B on four tensor ranks, by hand."""
    (rank,) = planned("short_cot_14b").ranks
    held = rank.counts.parameters
    assert rank.counts.expert_parameters == 0
    assert (rank.parameters, rank.gradients, rank.optimizer) == (2 * held, 4 * held, 6 * held)
    rest = rank.activations + rank.head + rank.communication
    assert rank.training == rank.peak == 12 * held + rest


def test_overlapped_sampling_and_training_take_the_longer_of_both() -> None:
    name = "short_cot_7b"
    after = planned(name, *APART, cluster=HALVES)
    overlapped = planned(name, *APART, "rollout.asynchrony=one_step_off", cluster=HALVES)
    assert after.serving and overlapped.serving
    assert overlapped.seconds == max(overlapped.training.seconds, overlapped.serving.seconds) + (
        overlapped.serving.sync_seconds + overlapped.host_seconds
    )
    both = (after.training.seconds, after.serving.seconds)
    assert after.seconds == pytest.approx(overlapped.seconds + min(both))


def test_only_a_broadcast_sends_and_receives_weights_at_once() -> None:
    """Less the seconds of the buckets' requests. Memory handles send nothing."""
    name = "short_cot_7b"
    apart = planned(name, *APART, cluster=HALVES)
    servers, both = apart.config.sglang, apart.serving
    disk = planned(name, *APART, "sglang.sync_method=disk", cluster=HALVES).serving
    assert both and disk and servers.sync_method == "broadcast"
    size = servers.sync_bucket_mib << 20
    requests = math.ceil(both.sync_bytes / size) * H100.bucket_seconds
    ratio = (both.sync_seconds - requests) / (disk.sync_seconds - requests)
    assert ratio == pytest.approx((1 + size / both.sync_bytes) / 2)
    handles = planned(name).serving
    assert handles and handles.sync_seconds == pytest.approx(
        both.sync_bytes / H100.link_rate(1)
        + math.ceil(both.sync_bytes / size) * H100.handle_seconds
    )


def test_the_tail_comes_after_the_phase_of_full_throughput() -> None:
    """Three rollouts on two places, by hand: a token takes 1 second, and 1 more for each rollout
    that is decoded with it; the step receives the mean length.
    """
    seen = []

    def step(sequences: float, length: float) -> float:
        seen.append((sequences, length))
        return 1.0 + sequences

    # both until 2, then the third with the first until 6, then the first alone until 10
    assert scheduled([10.0, 2.0, 4.0], 2, 5.0, step) == 2 * 3 + 4 * 3 + 4 * 2
    assert seen == [(2, 6.0), (2, 5 + (4 + 2) / 2), (1, 13.0)]
    lengths = spread(1000, 3000.0, 4000.0)
    assert max(lengths) == 4000 and sum(lengths) / 1000 == pytest.approx(3000, rel=0.01)
    assert max(spread(64, 100.0, 4000.0)) == 4000


def test_a_reference_model_is_another_pass() -> None:
    plain, reference = planned("short_cot_7b"), planned("short_cot_7b", "loss.kl_loss_coef=0.01")
    ratio = reference.training.model_operations / plain.training.model_operations
    assert ratio == pytest.approx(5 / 4)
    more = reference.worst.parameters / plain.worst.parameters
    assert more == 2, "its weights are on the GPU too"
    urls = "sglang.reference_urls=[http://there:1]"
    served = planned("short_cot_7b", "loss.kl_loss_coef=0.01", urls)
    assert served.training == plain.training and served.worst == plain.worst
    distilled = ("short_cot_7b", "loss.distillation_coef=1", "rollout.dynamic_sampling=false")
    exact = planned(*distilled, "loss.distillation_top_k=16")
    logits = WHOLE_LOGIT * exact.config.policy.max_tokens_per_gpu * exact.shape.vocabulary
    assert logits < exact.worst.head < 1.2 * logits, "a loss that reads them has them whole"
    larger = planned(*distilled, "policy.ref_hf_checkpoint=Qwen2.5-14B-Instruct")
    assert larger.training.model_operations > 1.1 * reference.training.model_operations
    assert larger.worst.parameters > 1.3 * reference.worst.parameters


def test_rollouts_that_are_not_trained_are_sampled_too() -> None:
    """short_cot_7b, whose servers are full: time goes as the number of rollouts does."""
    name = "short_cot_7b"
    rollout = planned(name).config.rollout
    plain = planned(name).serving
    greedy = planned(name, "scoring.advantage=remax").serving
    assert plain and greedy and plain.concurrency == greedy.concurrency
    one_more = 1 + 1 / rollout.n_samples_per_prompt
    assert greedy.seconds == pytest.approx(plain.seconds * one_more, rel=0.1)
    aepo = planned(name, "rollout.resampling.method=aepo").serving
    assert aepo and aepo.resampled == rollout.rollout_batch_size // 4 * rollout.n_samples_per_prompt
    assert aepo.resampled_seconds and aepo.seconds == plain.seconds + aepo.resampled_seconds
    uec_rl = ("rollout.resampling.method=uec_rl", "rollout.dynamic_sampling=false")
    unknown = planned(name, *uec_rl).serving
    prompts = rollout.over_sampling_batch_size or rollout.rollout_batch_size
    assert unknown and unknown.resampled == 20 * prompts and unknown.resampled_seconds is None
    assert unknown.seconds == plain.seconds
    rows = {row[0]: row[1:] for row in work_rows(planned(name, *uec_rl))}
    assert rows["sampled again, at most"] == (f"{20 * prompts:,} rollouts", "not counted")
    rows = {row[0]: row[1:] for row in work_rows(planned(name, "rollout.resampling.method=aepo"))}
    assert rows["sampled again, included above"] == (
        f"{aepo.resampled:,} rollouts",
        f"{aepo.resampled_seconds:,.1f} (c)",
    )
    assert not any("again" in row for row in map("".join, work_rows(planned(name))))


def test_adapters_that_a_run_refuses_have_no_plan() -> None:
    name, split = "long_cot_30b_a3b_lora", "policy.expert_tensor_parallel_size=2"
    layout = (split, "policy.expert_model_parallel_size=4")
    with pytest.raises(UserError, match=split):
        planned(name, *layout, "adapters.targets=q,up")
    planned(name, *layout, "adapters.experts=none", "adapters.start=/on/another/machine")


def test_adapters_alone_are_sent_in_place_of_all_weights() -> None:
    """Qwen3-32B, rank 32: A [32, I] and B [32, O] of seven projections in 64 layers, in bf16."""
    words = "sglang.colocated=false sglang.sync_method=broadcast rollout.asynchrony=one_step_off"
    cluster = Cluster(8, 8)
    whole, alone = (
        planned("long_cot_32b_lora", *words.split(), f"adapters.merge={merge}", cluster=cluster)
        for merge in ("true", "false")
    )
    assert whole.serving is not None and alone.serving is not None
    width, heads, keys, hidden = 5120, 64 * 128, 8 * 128, 25600
    sides = 2 * (width + heads) + 2 * (width + keys) + 3 * (width + hidden)
    size = alone.serving.sync_bytes
    assert size == 2 * 32 * 64 * sides
    gpus = whole.config.sglang.gpus_per_server
    assert alone.serving.weights - whole.serving.weights == pytest.approx(2 * size / gpus)
    assert whole.serving.cache - alone.serving.cache == pytest.approx(2 * size / gpus)
    assert whole.serving.sync_bytes == model_bytes(whole.shape)
    assert alone.serving.sync_seconds < whole.serving.sync_seconds / 5
    shared = planned("long_cot_32b_lora", "adapters.merge=false")  # its base is sent every time
    assert shared.serving is not None
    assert shared.serving.sync_bytes == whole.serving.sync_bytes + alone.serving.sync_bytes


def test_servers_without_gpus_are_refused() -> None:
    config = override(Config(), ["policy.hf_checkpoint=Qwen3-8B", "rollout.engine=sglang"])
    with pytest.raises(UserError, match="give --rollout-gpus"):
        make_plan(config, Cluster(8, 0))


def test_blocks_of_fp8_that_a_run_would_split_have_no_plan() -> None:
    """Experts of Qwen3-30B-A3B are 768 wide, the MLP of Qwen2.5-14B 13,824 on eight ranks."""
    servers = "sglang.weights=fp8_uncorrected"
    with pytest.raises(UserError, match="a server of 4 GPUs would hold"):
        planned("long_cot_30b_a3b", servers)
    assert not planned("long_cot_30b_a3b", servers, "sglang.server_args=--ep-size 4").faults
    rounded = ("policy.weight_quantization=fp8", "policy.tensor_model_parallel_size=8")
    with pytest.raises(UserError, match="tensor_model_parallel_size=8 splits"):
        planned("short_cot_14b", *rounded)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "glm4_moe"])
@pytest.mark.parametrize("rounded", ["none", "fp8_experts"])
def test_fp8_servers_hold_one_byte_for_each_encoded_weight(family: str, rounded: str) -> None:
    """One scale for 128 x 128 of them is added; both are counted in the table of names."""
    hf = tiny_config(family)
    encoded = block_matrices(hf, experts_only=rounded == "fp8_experts")
    shapes = {n: s for entry in name_table(hf) for n, s in entry.tensors}
    weights = sum(math.prod(shapes[name]) for name in encoded)
    words = ["sglang.weights=fp8_uncorrected", "policy.dtype=bf16"]
    config = override(Config(), [*words, f"policy.weight_quantization={rounded}"])
    saved = model_bytes(shape_of(hf)) - served_bytes(shape_of(hf), config)
    assert saved == pytest.approx(weights * (1 - 4 / 128**2))
    assert served_bytes(shape_of(hf), Config()) == model_bytes(shape_of(hf))
