"""A plan in words and numbers, for a terminal and for the pages."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_stare.config import PolicyConfig
from megatron_stare.planning.memory import RankMemory
from megatron_stare.planning.plan import GIB, RunPlan
from megatron_stare.planning.serving import Serving

BASIS = (
    "(c) calibrated: formulas fitted to published H100 runs of other trainers, `plan "
    "--calibration`; (p) published: a data sheet's rate; (u) uncalibrated: a formula. No run of "
    "this project on a GPU has checked them."
)
SUMMARY_HEADER = (
    *("recipe", "GPUs", "layout", "peak GiB (u)", "step s (c)", "MFU (c)"),
    "GPU-h / 1,000 steps (c)",
)


def layout(policy: PolicyConfig) -> str:
    """The parallel sizes above 1 and the recomputation, e.g. TP2 PP4 full recompute."""
    names = {
        "TP": policy.tensor_model_parallel_size,
        "PP": policy.pipeline_model_parallel_size,
        "VPP": policy.virtual_pipeline_model_parallel_size,
        "CP": policy.context_parallel_size,
        "EP": policy.expert_model_parallel_size,
    }
    words = [f"{name}{size}" for name, size in names.items() if size > 1]
    if policy.recompute_granularity != "none":
        modules = policy.recompute_modules.replace(",", ", ")
        what = "full" if policy.recompute_granularity == "full" else modules
        words.append(f"{what} recompute")
    return " ".join(words) or "one GPU a replica"


def summary_row(name: str, plan: RunPlan) -> tuple[str, ...]:
    """One line of `plan --list`, under SUMMARY_HEADER."""
    return (
        name,
        f"{plan.cluster.trainer_gpus} + {plan.cluster.rollout_gpus}",
        f"{layout(plan.config.policy)}, DP{plan.sizes.data}",
        f"{plan.worst.peak / GIB:.1f}" + ("" if not plan.faults else " does not fit"),
        f"{plan.seconds:,.0f}",
        f"{plan.mfu:.2f}",
        f"{plan.gpu_hours:,.0f}",
    )


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side, two spaces between them."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table of a page; the first row is its header."""
    lines = [rows[0], ("---",) * len(rows[0]), *rows[1:]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def memory_rows(plan: RunPlan) -> list[tuple[str, ...]]:
    """The parts of memory by pipeline stage [GiB]."""
    parts: dict[str, list[float]] = {}
    for rank in plan.ranks:
        for name, value in memory_parts(rank).items():
            parts.setdefault(name, []).append(value)
    stages = tuple(f"stage {rank.counts.stage}" for rank in plan.ranks)
    return [
        ("GiB per rank (u)", *stages),
        *(
            (name, *(f"{value / GIB:.2f}" for value in values))
            for name, values in parts.items()
            if any(values)
        ),
    ]


def memory_parts(rank: RankMemory) -> dict[str, float]:
    """The parts of a rank's memory [bytes], their sums, and the usable memory."""
    return {
        "parameters": rank.parameters,
        "gradients": rank.gradients,
        "optimizer state": rank.optimizer,
        "activations": rank.activations,
        "head": rank.head,
        "embedded engine": rank.engine,
        "communication, context": rank.communication,
        "while training": rank.training,
        "trainer while sampling": rank.generating,
        "server's weights": rank.server_weights,
        "server's cache": rank.server_cache,
        "usable": rank.capacity,
    }


def work_rows(plan: RunPlan) -> list[tuple[str, ...]]:
    """One step: operations, bytes sent, and the seconds of each part."""
    work = plan.training
    rows: list[tuple[str, ...]] = [
        ("one step", "amount", "seconds planned"),
        ("tokens trained", f"{plan.tokens.total:,.0f}", ""),
        (
            f"computing, {work.micro_batches} micro-batches a rank",
            f"{work.operations / 1e15:,.1f} PFLOP",
            f"{work.compute_seconds:,.1f} (c)",
        ),
    ]
    if work.bubble_seconds:
        rows.append(("pipeline bubble", "", f"{work.bubble_seconds:,.1f} (c)"))
    for name, size in work.group_bytes.items():
        rows.append(
            (
                f"{name} group",
                f"{size / 1e9:,.1f} GB a rank",
                f"{work.group_seconds[name]:,.1f} (u)",
            )
        )
    rows.append(("optimizer", "", f"{work.optimizer_seconds:,.2f} (p)"))
    if plan.serving:
        served = plan.serving
        servers = "1 server" if served.servers == 1 else f"{served.servers} servers"
        rows += [
            (
                f"rollouts, {servers} x {served.concurrency:,.0f} sequences",
                f"{served.tokens_a_second:,.0f} tokens/s",
                f"{served.seconds:,.1f} (c)",
            ),
            *_resampled_rows(served),
            (
                "weights to servers",
                f"{served.sync_bytes / 1e9:,.1f} GB",
                f"{served.sync_seconds:,.1f} (c)",
            ),
        ]
    rows.append(
        ("host, rewards, optimizer to the host and back", "", f"{plan.host_seconds:,.1f} (c)")
    )
    return [*rows, ("step", f"MFU {plan.mfu:.2f}", f"{plan.seconds:,.1f} (c)")]


def _resampled_rows(served: Serving) -> list[tuple[str, ...]]:
    if not served.resampled:
        return []
    amount = f"{served.resampled:,} rollouts"
    if served.resampled_seconds is None:
        return [("sampled again, at most", amount, "not counted")]
    return [("sampled again, included above", amount, f"{served.resampled_seconds:,.1f} (c)")]


def cost_text(other: RunPlan) -> str:
    """The cost of the same run with its servers elsewhere, in words."""
    gpus = other.cluster
    where = "on the trainer's GPUs" if not gpus.rollout_gpus else "on GPUs of their own, 1 step off"
    fits = "" if not other.faults else ", which does not fit"
    return (
        f"With servers {where} ({gpus.trainer_gpus} + {gpus.rollout_gpus} GPUs): "
        f"{other.seconds:,.0f} s a step (c), {other.gpu_hours:,.0f} GPU-hours (c){fits}."
    )


def plan_text(name: str, plan: RunPlan) -> str:
    """The whole plan of a run as text."""
    policy, cluster = plan.config.policy, plan.cluster
    lines = [
        f"{name}: {policy.hf_checkpoint} on {cluster.trainer_gpus} + {cluster.rollout_gpus} GPUs "
        f"({plan.machine.name}), {layout(policy)}, DP{plan.sizes.data}, "
        f"{policy.max_tokens_per_gpu:,} tokens on a rank in a micro-batch",
        "",
        aligned(memory_rows(plan)),
        "",
        aligned(work_rows(plan)),
        "",
        f"{plan.gpu_hours:,.0f} GPU-hours (c) for 1,000 steps, with prompts of "
        f"{plan.tokens.prompt:,.0f} and responses of {plan.tokens.response:,.0f} tokens on average",
    ]
    lines += [f"does not fit: {fault}" for fault in plan.faults] or ["fits"]
    if plan.starts_other_servers:
        lines.append(
            f"planned with {plan.servers_a_node} servers on a node of {plan.machine.gpus_per_node} "
            f"GPUs; sglang.num_servers={plan.config.sglang.num_servers} starts another number: set "
            f"sglang.num_servers={plan.servers_a_node}"
        )
    return "\n".join([*lines, BASIS])
