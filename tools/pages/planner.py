"""The planner's parts of docs/recipes.md and docs/scale.md."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_stare.config import Config, override
from megatron_stare.config.rollout import MEMORY_SHARE
from megatron_stare.planning import calibration
from megatron_stare.planning.machine import H100
from megatron_stare.planning.plan import GIB, RunPlan, make_plan, placements
from megatron_stare.planning.serving import static_share
from megatron_stare.planning.suggest import stage_counts_alike
from megatron_stare.planning.tables import (
    BASIS,
    SUMMARY_HEADER,
    cost_text,
    layout,
    markdown,
    memory_rows,
    summary_row,
    work_rows,
)
from megatron_stare.recipes import CLUSTERS, RECIPES, Cluster, find_recipe

# The organisation that publishes a model, by the beginning of the model's name.
ORIGIN = {"Qwen": "Qwen", "DeepSeek": "deepseek-ai", "GLM": "zai-org", "Moonlight": "moonshotai"}
SETTINGS = ("short_cot", "long_cot", "tool_use")
PAGES = ("recipes.md", "scale.md")
FIGURES_NAME = "null_ranks.json"  # in the folder of the pages; benchmarks/null_ranks.py writes it
EXECUTED_HEADER = (
    *("recipe", "planned GiB", "allocated GiB", "planned / allocated", "reserved GiB"),
    *("launches", "waits", "micro-batches", "TFLOP", "GB sent by group size"),
)
_SENDING = ("all_gather", "all_reduce", "reduce_scatter", "broadcast", "send", "all_to_all")
SCALED = "long_cot_32b"
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
TOKENS = (4096, 8192, 16384, 32768, 65536, 131072)
DATA = "data.prompt_data=math.jsonl evaluation.eval_data.aime24=aime24.parquet"
SERVER = "sglang.python=/opt/sglang/bin/python"
WIDTH = 118  # of a line of prose or of a command, in columns


def tables(directory: Path) -> dict[str, str]:
    """The generated parts of the pages in a directory, by the name in their marks."""
    plans = {name: make_plan(find_recipe(name), cluster) for name, cluster in CLUSTERS.items()}
    rows = [SUMMARY_HEADER, *(summary_row(name, plan) for name, plan in plans.items())]
    found = {"all recipes": _marked(markdown(rows))}
    for setting in SETTINGS:
        names = [name for name in CLUSTERS if name.startswith(setting)]
        found[setting] = _marked("\n".join(_recipe(name, plans[name]) for name in names))
    found |= {"by GPUs": _marked(markdown(_by_gpus()))}
    found |= {"by tokens": _marked(markdown(_by_tokens()))}
    found |= {"calibration": markdown(calibration.table())}
    return found | {"executed": markdown(executed_table(directory))}


def _marked(text: str) -> str:
    """The planner's figures with the note on what they rest."""
    return f"{textwrap.fill(BASIS, WIDTH)}\n\n{text}"


def rewritten(text: str, found: dict[str, str]) -> str:
    """A page whose parts between `<!-- plan: NAME -->` and `<!-- end -->` are replaced."""

    def between(mark: re.Match[str]) -> str:
        return f"{mark[1]}\n\n{found[mark[2]].strip()}\n\n{mark[3]}"

    return re.sub(r"(<!-- plan: ([\w ]+) -->).*?(<!-- end -->)", between, text, flags=re.DOTALL)


def _recipe(name: str, plan: RunPlan) -> str:
    said = " ".join((inspect.getdoc(RECIPES[name]) or "").split())
    policy, servers = plan.config.policy, plan.config.sglang
    each = "one GPU" if servers.gpus_per_server == 1 else f"{servers.gpus_per_server} GPUs"
    where = f"of {each}{' on the same GPUs' if servers.colocated else ''}"
    served, trained = plan.serving.servers if plan.serving else 0, plan.cluster.trainer_gpus
    sampling = f"1 server {where} samples" if served == 1 else f"{served} servers {where} sample"
    trainers = "1 GPU trains" if trained == 1 else f"{trained} GPUs train"
    held = max(rank.generating for rank in plan.ranks)
    share = static_share(plan.config, plan.machine, held)
    others = [make_plan(*placed) for placed in placements(plan.config, plan.cluster)]
    lines = [
        f"### {name}\n",
        textwrap.fill(
            f"{said} {plan.config.data.rollout_max_prompt_len:,} + "
            f"{plan.config.rollout.rollout_max_response_len:,} tokens. "
            f"{trainers}, {layout(policy)}, DP{plan.sizes.data}, "
            f"{policy.max_tokens_per_gpu:,} tokens per rank and micro-batch; {sampling}"
            + (f" (`{MEMORY_SHARE} {share:.2f}`)" if servers.colocated else "")
            + f". {plan.gpu_hours:,.0f} GPU-hours for 1,000 steps "
            f"(planned). {' '.join(map(cost_text, others))}",
            WIDTH,
            break_on_hyphens=False,
        )
        + "\n",
        markdown(memory_rows(plan)),
        markdown(work_rows(plan)),
        *(_wrapped(command) for command in commands(name, plan.config, plan.cluster)),
        "",
    ]
    return "\n".join(lines)


def _wrapped(command: str) -> str:
    """A command as an indented block, with long lines broken between words."""
    lines = textwrap.wrap(
        command,
        WIDTH,
        initial_indent="    ",
        subsequent_indent="        ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return " \\\n".join(lines)


def commands(name: str, config: Config, cluster: Cluster) -> list[str]:
    """The commands from download to an evaluated checkpoint, one a line."""
    model = Path(config.policy.hf_checkpoint).name
    origin = next(own for beginning, own in ORIGIN.items() if model.startswith(beginning))
    run = config.run.dir + ("/seed0/stare" if config.compare.arms else "")
    cold = " cold_start.data=conversations.jsonl" if config.compare.arms else ""
    nodes = -(-cluster.trainer_gpus // 8)
    ranks = min(8, cluster.trainer_gpus)
    launch = f"torchrun --nproc-per-node {ranks} -m megatron_stare"
    if nodes > 1:
        launch = (
            f"torchrun --nnodes {nodes} --nproc-per-node {ranks} --rdzv-backend c10d "
            "--rdzv-endpoint node1:29500 -m megatron_stare"
        )
    serve, place = [], config.policy.hf_checkpoint
    tokenizer = f"python -m megatron_stare convert tiktoken-to-hf {place} {place}"
    where = SERVER
    if cluster.nodes > 1:
        serve = [
            f"python -m megatron_stare serve {name} {SERVER} sglang.host=0.0.0.0 sglang.port=30000"
        ]
        where = f"'sglang.urls=[{','.join(_urls(config, cluster))}]'"
    return [
        f"hf download {origin}/{model} --local-dir {place}",
        *([tokenizer] if model.startswith("Moonlight") else []),
        f"python -m megatron_stare doctor {name}",
        f"python -m megatron_stare plan {name}",
        *serve,
        f"{launch} train {name} {DATA}{cold} {where}",
        f"{launch} evaluate {run} {where}",
        f"python -m megatron_stare convert megatron-to-hf {run} exported/{name}",
    ]


def _urls(config: Config, cluster: Cluster) -> list[str]:
    """Every server's address, on the trainer's nodes if colocated, else on the nodes after them."""
    trainers, servers = -(-cluster.trainer_gpus // 8), config.sglang.num_servers
    first = 1 if config.sglang.colocated else trainers + 1
    nodes = trainers if config.sglang.colocated else cluster.rollout_gpus // 8
    return [
        f"http://node{first + node}:{30000 + number}"
        for node in range(nodes)
        for number in range(servers)
    ]


def _by_gpus() -> list[tuple[str, ...]]:
    """The same 32B run on 8 to 4,096 GPUs, half of them servers: with the recipe's batch, and with
    a batch that grows with the GPUs.
    """
    head = (
        "GPUs | layout | peak GiB (u) | train s (c) | sample s (c) | sync s (c) | step s (c) | "
        "MFU (c) | step s (c), 8 sequences a GPU | MFU (c) | host GiB a node (u)"
    )
    rows: list[tuple[str, ...]] = [tuple(head.split(" | "))]
    for gpus in GPUS:
        plan = _scaled(gpus, 512)
        grown = _scaled(gpus, 8 * gpus)
        assert plan.serving is not None
        rows.append(
            (
                f"{gpus:,}",
                f"{layout(plan.config.policy)}, DP{plan.sizes.data}",
                f"{plan.worst.peak / GIB:.1f}" + (" no fit" if plan.faults else ""),
                f"{plan.training.seconds:,.0f}",
                f"{plan.serving.seconds:,.0f}",
                f"{plan.serving.sync_seconds:.1f}",
                f"{plan.seconds:,.0f}",
                f"{plan.mfu:.2f}",
                f"{grown.seconds:,.0f}",
                f"{grown.mfu:.2f}",
                f"{grown.host_bytes / GIB:,.0f}",
            )
        )
    return rows


def _scaled(gpus: int, sequences: int) -> RunPlan:
    """Half of the GPUs train: tensor parallel in a node, context parallel over up to four nodes,
    data parallel above that.
    """
    config = _halves()
    trainers = gpus // 2
    tensor = min(8, trainers)
    context = min(4, max(1, trainers // tensor))
    policy = dataclasses.replace(
        config.policy,
        tensor_model_parallel_size=tensor,
        context_parallel_size=context,
        max_tokens_per_gpu=_budget(33792, tensor, context),
        recompute_granularity="none" if context == 4 else "full",
    )
    prompts = max(1, sequences // config.rollout.n_samples_per_prompt)
    rollout = dataclasses.replace(
        config.rollout, rollout_batch_size=prompts, over_sampling_batch_size=3 * prompts
    )
    changed = dataclasses.replace(config, policy=policy, rollout=rollout)
    return _planned(changed, Cluster(trainers, gpus - trainers))


def _by_tokens() -> list[tuple[str, ...]]:
    """The 32B model on 64 + 64 GPUs by response length: the smallest context-parallel size that
    fits, and a rank's memory without context parallelism.
    """
    head = (
        "response | CP | peak GiB (u) | peak GiB at CP1 (u) | train s (c) | sample s (c) | "
        "sequences a server (u) | logits not kept GiB (u)"
    )
    rows: list[tuple[str, ...]] = [tuple(head.split(" | "))]
    for tokens in TOKENS:
        plans = {context: _longer(tokens, context) for context in (1, 2, 4, 8)}
        fitting = [context for context, plan in plans.items() if not plan.faults]
        plan = plans[fitting[0]] if fitting else plans[8]
        assert plan.serving is not None
        logits = 4 * plan.config.policy.max_tokens_per_gpu * plan.shape.vocabulary / 8
        rows.append(
            (
                f"{tokens:,}",
                str(plan.sizes.context) + ("" if fitting else " no fit"),
                f"{plan.worst.peak / GIB:.1f}",
                f"{plans[1].worst.peak / GIB:.1f}",
                f"{plan.training.seconds:,.0f}",
                f"{plan.serving.seconds:,.0f}",
                f"{plan.serving.concurrency:,.0f}",
                f"{logits / GIB:.1f}",
            )
        )
    return rows


def _halves() -> Config:
    """The scaled recipe with servers of 4 GPUs on GPUs of their own."""
    words = "sglang.colocated=false policy.offload_while_generating=false sglang.gpus_per_server=4"
    return override(find_recipe(SCALED), words.split())


def _longer(tokens: int, context: int) -> RunPlan:
    config = _halves()
    policy = dataclasses.replace(
        config.policy,
        context_parallel_size=context,
        max_tokens_per_gpu=_budget(tokens + 1024, 8, context),
    )
    rollout = dataclasses.replace(config.rollout, rollout_max_response_len=tokens)
    return _planned(dataclasses.replace(config, policy=policy, rollout=rollout), Cluster(64, 64))


def _budget(longest: int, tensor: int, context: int) -> int:
    """Tokens of a rank that hold one of the longest sequences, aligned."""
    whole = 2 * tensor * context
    return -(-longest // whole) * whole // context


def _planned(config: Config, cluster: Cluster) -> RunPlan:
    return make_plan(config, cluster, H100, counts=stage_counts_alike(config, config.policy))


@dataclass(frozen=True)
class Executed:
    """One rank on the null device, a GPU that computes nothing, over two steps; the optimizer has
    its state in the second.
    """

    recipe: str
    planned: float  # bytes
    allocated: float  # bytes, peak of torch's allocator over all phases
    figures: dict[str, Any]

    @property
    def ratio(self) -> float:
        """Planned / allocated."""
        return self.planned / self.allocated


def executed(directory: Path) -> list[Executed]:
    """One entry per measured rank, without the planned memory that torch's allocator does not see
    (the CUDA context, NCCL, buckets of weights for servers).
    """
    found = []
    for name, ranks in json.loads((directory / FIGURES_NAME).read_text()).items():
        plan = make_plan(find_recipe(name), CLUSTERS[name])
        for figures in ranks:
            rank = plan.ranks[figures["stage"]]
            planned = rank.training - rank.communication
            peak = max(phase["peak_bytes"] for phase in figures["phases"].values())
            found.append(Executed(name, planned, peak, figures))
    return found


def executed_table(directory: Path) -> list[tuple[str, ...]]:
    """EXECUTED_HEADER, and a line for every measured rank, as docs/scale.md has them."""
    return [EXECUTED_HEADER, *map(_executed_line, executed(directory))]


def _executed_line(each: Executed) -> tuple[str, ...]:
    phases = each.figures["phases"]
    update = phases["update 2"]
    sent: dict[int, float] = {}
    for key, count in update["bytes"].items():
        operation, ranks = key.split()[0], int(re.search(r"of (\d+)$", key)[1])  # type: ignore[index]
        if operation in _SENDING:
            sent[ranks] = sent.get(ranks, 0.0) + count
    reserved = max(phase["reserved_bytes"] for phase in phases.values())
    return (
        each.recipe,
        f"{each.planned / GIB:.1f}",
        f"{each.allocated / GIB:.1f}",
        f"{each.ratio:.2f}",
        f"{reserved / GIB:.1f}",
        f"{update['launches']:,}",
        str(update["syncs"]),
        str(each.figures["micro_batches"]),
        f"{update['tflop']:,.0f}",
        ", ".join(f"{ranks}: {count / 1e9:.1f}" for ranks, count in sorted(sent.items())),
    )
