"""The planner's figures next to published ones of H100s, on cases that it was fitted to and on
others.

Published figures are facts only, each with its source. `before` is what the planner said at commit
f163397, with ceilings alone. GRPO cases are NeMo-RL's: vLLM and Megatron, 2,048 or 512 sequences in
optimizer steps of 512, a policy and a reference pass (KL penalty 0.01); layouts and memory shares
are those of its tables and recipes. Where a later release publishes another time of the same case,
it is a row too.
machine.py marks the fitted figures with (c); `fit` names the rows that they were fitted to.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron_stare.config import Config, override
from megatron_stare.planning.machine import H100
from megatron_stare.planning.memory import cache_bytes_per_token, model_bytes
from megatron_stare.planning.plan import make_plan
from megatron_stare.planning.serving import decoding_seconds, sync_seconds
from megatron_stare.planning.shapes import model_shape, sizes, stage_counts
from megatron_stare.planning.work import Tokens, training
from megatron_stare.policy.huggingface.shape import shape_of
from megatron_stare.recipes import Cluster

NEMO_4 = "NVIDIA-NeMo/RL docs/about/performance-summary.md at 06beed91 (v0.4)"
NEMO_5 = "docs.nvidia.com/nemo/rl/0.5.0/about/performance-summary.html"
NEMO_6 = "docs.nvidia.com/nemo/rl/0.6.0/about/performance-summary.html"
BRIDGE = "NVIDIA-NeMo/Megatron-Bridge docs/performance-summary.md at df0289c1"
HEADER = ("case", "published", "planned before", "planned", "planned / published", "row", "source")
TRAINED = "policy.dtype=bf16 policy.use_distributed_optimizer=true "
GRPO = TRAINED + "rollout.engine=sglang loss.kl_loss_coef=0.01 data.rollout_max_prompt_len=512 "
COLOCATED = "sglang.colocated=true sglang.sync_method=tensor policy.offload_while_generating=true "
GPU_BYTES = 81559 * 2**20  # an H100's memory, of which vLLM takes its share; plans assume less
OFF = "rollout.asynchrony=one_step_off "
STAGES_235B = (
    "policy.pipeline_model_parallel_size=8 policy.num_layers_in_first_pipeline_stage=11 "
    "policy.num_layers_in_last_pipeline_stage=11 policy.expert_tensor_parallel_size=1 "
)


@dataclass(frozen=True)
class Cited:
    """A published figure [seconds, or tokens a second], and how the planner is asked for it."""

    name: str
    published: float
    before: float
    source: str
    fit: bool = False
    model: str = ""
    gpus: tuple[int, int] = (0, 0)  # trainers, and servers of their own
    lengths: tuple[int, float] = (4096, 0.0)  # limit and mean, prompts included
    sequences: int = 2048
    share: float = 0.6  # of a server's memory, vllm_cfg.gpu_memory_utilization
    keys: str = ""

    def planned(self) -> float:
        """The planner's seconds of a GRPO step."""
        limit, mean = self.lengths
        share = self.share * GPU_BYTES / H100.memory_bytes
        machine = dataclasses.replace(H100, static_share=share)
        config = self.config(
            f"{GRPO}rollout.rollout_batch_size={self.sequences // 32} "
            f"rollout.n_samples_per_prompt=32 rollout.rollout_max_response_len={limit - 512} "
            f"train.num_steps_per_rollout={self.sequences // 512} "
        )
        return make_plan(config, Cluster(*self.gpus), machine, response_tokens=mean - 128).seconds

    def config(self, keys: str) -> Config:
        words = f"policy.hf_checkpoint={self.model} {keys}{self.keys}".split()
        return override(Config(), words)


class Pretraining(Cited):
    """A step of Megatron-Bridge: whole sequences in `sequences`, no rollouts and no scores."""

    def planned(self) -> float:
        config, (limit, _) = self.config(TRAINED), self.lengths
        hf, group = model_shape(self.model), sizes(config.policy, self.gpus[0])
        counts = tuple(stage_counts(hf, config.policy, self.gpus[0]))
        tokens = Tokens(self.sequences, 0.0, float(limit))
        return training(config, shape_of(hf), counts, group, tokens, H100, 0).seconds


class Sync(Cited):
    """The weights of `model` to servers, once."""

    def planned(self) -> float:
        whole = model_bytes(shape_of(model_shape(self.model)))
        return sync_seconds(self.config(""), whole, whole, H100)


# An SGLang server alone. Its host's part of a step is published in sgl-project/sglang-omni#760; the
# figures of H100 are those of whole RL steps, whose engines (vLLM) take longer.
SERVER = dataclasses.replace(H100, decode_latency=1.5e-3, decode_layer=1e-5)


class Decoding(Cited):
    """Tokens a second of one server with `sequences` at a time; lengths are their mean."""

    def planned(self) -> float:
        config, shape = self.config(""), shape_of(model_shape(self.model))
        gpus = config.sglang.gpus_per_server
        weights, cache = model_bytes(shape) / gpus, cache_bytes_per_token(shape, config)
        length = cache * self.lengths[1]
        step = decoding_seconds(self.sequences, shape, weights, length, gpus, SERVER)
        return self.sequences / step


def _layout(tp: int, pp: int, ep: int = 1, cp: int = 1, limit: int = 4096) -> str:
    words = f"policy.tensor_model_parallel_size={tp} policy.pipeline_model_parallel_size={pp} "
    words += f"policy.context_parallel_size={cp} policy.expert_model_parallel_size={ep} "
    words += f"policy.max_tokens_per_gpu={limit // cp} "
    words += f"policy.sequence_parallel={str(tp > 1).lower()} "
    return words + ("policy.expert_tensor_parallel_size=1 " if ep > 1 else "")


_LLAMA = _layout(1, 2) + "policy.recompute_granularity=full "
_30B = "sglang.gpus_per_server=2 "
_32B = _layout(4, 4) + "sglang.gpus_per_server=4 "
_235B = (
    _layout(2, 8, 16, 2, 8192) + STAGES_235B + COLOCATED + "sglang.gpus_per_server=16",
    _layout(4, 8, 16, 1, 8192) + STAGES_235B + OFF + "sglang.gpus_per_server=8",
)
_L8, _Q30, _Q32, _Q235 = "Llama-3.1-8B", "Qwen3-30B-A3B", "Qwen3-32B", "Qwen3-235B-A22B"
_SYNC = "sglang.sync_method=tensor"
ROWS: tuple[Cited, ...] = (
    Cited("GRPO Llama-3.1-8B, 16 GPUs [s]", 97.7, 60.2, NEMO_4, True, _L8, (16, 0), (4096, 1060),
        keys=_LLAMA + COLOCATED),
    Cited("GRPO Llama-3.1-8B, 16 GPUs [s]", 92.8, 60.2, NEMO_5, False, _L8, (16, 0), (4096, 1060),
        keys=_LLAMA + COLOCATED),
    Cited("GRPO Llama-3.1-8B, 8 + 8 GPUs, 1 step off [s]", 74.6, 44.5, NEMO_4, False, _L8, (8, 8),
        (4096, 1129), keys=_LLAMA + OFF),
    Cited("GRPO Qwen3-30B-A3B, 32 GPUs [s]", 225, 102.9, NEMO_4, True, _Q30, (32, 0), (4096, 3154),
        keys=_layout(1, 1, 8) + _30B + COLOCATED),
    Cited("GRPO Qwen3-30B-A3B, 32 GPUs [s]", 192, 102.9, NEMO_6, False, _Q30, (32, 0), (4096, 3154),
        keys=_layout(1, 1, 8) + _30B + COLOCATED),
    Cited("GRPO Qwen3-30B-A3B, 16 + 16 GPUs, 1 step off [s]", 244, 107.3, NEMO_4, False, _Q30,
        (16, 16), (4096, 3158), keys=_layout(1, 2, 8) + _30B + OFF),
    Cited("GRPO Qwen3-32B, 32 GPUs [s]", 393, 235.6, NEMO_4, True, _Q32, (32, 0), (4096, 3206),
        keys=_32B + COLOCATED),
    Cited("GRPO Qwen3-32B, 32 GPUs [s]", 376, 235.6, NEMO_5, False, _Q32, (32, 0), (4096, 3206),
        keys=_32B + COLOCATED),
    Cited("GRPO Qwen3-32B, 32 + 32 GPUs, 1 step off [s]", 215, 118.6, NEMO_4, True, _Q32, (32, 32),
        (4096, 3207), keys=_32B + OFF),
    Cited("GRPO Qwen3-32B, 32 + 32 GPUs, 1 step off [s]", 200, 118.6, NEMO_5, False, _Q32, (32, 32),
        (4096, 3207), keys=_32B + OFF),
    Cited("GRPO Qwen3-235B-A22B, 128 GPUs [s]", 506, 172.1, NEMO_4, True, _Q235, (128, 0),
        (8192, 5671), 512, keys=_235B[0]),
    Cited("GRPO Qwen3-235B-A22B, 128 + 128 GPUs, 1 step off [s]", 241, 188.1, NEMO_4, False, _Q235,
        (128, 128), (8192, 5691), 512, 0.8, _235B[1]),
    Pretraining("pretraining Qwen3-30B-A3B, 16 GPUs, FP8 products [s]", 24.8, 0, BRIDGE, True, _Q30,
        (16, 0), (4096, 0), 512, keys=_layout(1, 2, 8)
        + "policy.virtual_pipeline_model_parallel_size=24"),
    Pretraining("pretraining Qwen3-235B-A22B, 256 GPUs, FP8 products [s]", 80.3, 0, BRIDGE, False,
        _Q235, (256, 0), (4096, 0), 8192, keys=_layout(2, 8, 32) + STAGES_235B),
    Sync("weights Qwen3-30B-A3B, flat buckets by broadcast [s]", 2.5, 1.8,
        "sgl-project/sglang#13824", True, _Q30),
    Sync("weights Qwen3-30B-A3B, flat buckets by handles, 8 H200 [s]", 3.0, 3.5,
        "vllm-project/vime#175 (slime)", True, _Q30, keys=_SYNC),
    Sync("weights Qwen3-30B-A3B by handles, SGLang of August 2025 [s]", 10, 3.5,
        "sgl-project/sglang#8753", False, _Q30, keys=_SYNC),
    Sync("weights Qwen3-30B-A3B by handles, slime of July 2025 [s]", 16, 3.5,
        "zhaochenyang20/Awesome-ML-SYS-Tutorial#169", False, _Q30, keys=_SYNC),
    Decoding("decoding Qwen3-8B, 1 GPU, 396 sequences [tokens/s]", 13322, 0,
        "tgarg01/silybench-data derived/csv/capacity.csv", False, "Qwen3-8B", lengths=(0, 640),
        sequences=396),
    *(Decoding(f"decoding Qwen3-30B-A3B's thinker, 2 GPUs, {count} sequences [tokens/s]", rate, 0,
        "sgl-project/sglang-omni#760", count == 16, _Q30, lengths=(0, 640), sequences=count,
        keys="sglang.gpus_per_server=2") for count, rate in ((16, 2274), (24, 3257), (32, 3775.2))),
)  # fmt: skip


def table() -> list[tuple[str, ...]]:
    """HEADER, and a line for every row."""
    return [HEADER, *map(_line, ROWS)]


def _line(row: Cited) -> tuple[str, ...]:
    planned = row.planned()
    return (
        row.name,
        f"{row.published:,.5g}",
        f"{row.before:,.5g}" if row.before else "-",
        f"{planned:,.1f}" if planned < 1000 else f"{planned:,.0f}",
        f"{planned / row.published:.2f}",
        "fit" if row.fit else "held out",
        row.source,
    )
