#!/usr/bin/env python
"""One rank of every recipe, trained for two steps on a device that computes nothing
(tools/nullcuda): the peaks of torch's own allocator, launches, waits of the host, bytes per group.

    tools/nullcuda/run .venv/bin/python benchmarks/null_ranks.py [RECIPE ...] [--output FILE]

Every rank with another pipeline stage is a process of its own, as rank r of the recipe's world. The
model is the real one, without its weights being read; micro-batches are full to
policy.max_tokens_per_gpu with sequences as long as the recipe lets them be. FILE, which keeps other
recipes' figures, is what a table of docs/scale.md is made of (`plan --pages docs`), and what the
planner is held to (tests/tools/test_pages_executed.py).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_stare.config import Config, override
from megatron_stare.planning.shapes import model_shape
from megatron_stare.policy.huggingface.families import sparse_layers
from megatron_stare.recipes import CLUSTERS, find_recipe

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "null_ranks.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", default=[], metavar="RECIPE", help="default: all")
    parser.add_argument("--output", type=Path, default=FIGURES)
    parser.add_argument("--rank", type=int, default=-1, help="this rank alone, in this process")
    options = parser.parse_args()
    if options.rank >= 0:
        print(json.dumps(trained(options.recipes[0], options.rank)))
        return
    known = json.loads(options.output.read_text()) if options.output.exists() else {}
    for name in options.recipes or CLUSTERS:
        config, world = find_recipe(name), CLUSTERS[name].trainer_gpus
        stages = config.policy.pipeline_model_parallel_size
        known[name] = [_in_a_process(name, stage * world // stages) for stage in range(stages)]
        options.output.write_text(json.dumps(known, indent=1) + "\n")
        print(name, json.dumps(known[name], indent=1), flush=True)


def _in_a_process(name: str, rank: int) -> dict[str, Any]:
    command = [sys.executable, __file__, name, "--rank", str(rank)]
    # Who goes to which expert is a value, of 48 layers and 17,408 tokens that have 8 each; the
    # layers' own values would fill the host's memory.
    more = {"NULLCUDA_ELEMENTS": str(1 << 18), "NULLCUDA_INDICES": str(1 << 23)}
    more = more if _has_experts(name) else {}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | more
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _has_experts(name: str) -> bool:
    return any(sparse_layers(model_shape(find_recipe(name).policy.hf_checkpoint)))


class Phases(dict[str, dict[str, Any]]):
    """Figures of what was run under a name."""

    def run(self, name: str, work: Any, *args: Any, **settings: Any) -> Any:
        """Its result; peaks, launches, waits and bytes are kept."""
        import torch

        from tools.nullcuda import counters

        torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        with counters.counting() as counts:
            result = work(*args, **settings)
        self[name] = {
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "launches": counts.launches,
            "syncs": counts.syncs,
            "tflop": round(counts.gemm_flops / 1e12, 2),
            "bytes": {
                f"{operation} {group} of {size}": traffic.bytes
                for (operation, group, size), traffic in sorted(counts.collectives.items())
            },
            "wall_seconds": round(time.perf_counter() - begun, 1),
        }
        return result


def trained(name: str, rank: int) -> dict[str, Any]:
    """Figures of rank `rank` of a recipe's world, by phase."""
    from megatron_stare.commands.gpuday.rank_memory import steps
    from megatron_stare.policy import topology as topologies
    from tools.nullcuda import world

    ranks, phases = CLUSTERS[name].trainer_gpus, Phases()
    with tempfile.TemporaryDirectory() as folder:
        config = _config(name, folder)
        world.join(rank, ranks)
        _uniform_distributions()
        topology = topologies.start(config.policy)
        actor, batch, _ = steps(config, topology, phases.run)
    linear = type(actor.chunks[0].decoder.layers[0].self_attention.linear_proj)
    return {
        "rank": rank,
        "world": ranks,
        "stage": topology.pipeline_rank,
        "transformer_engine": linear.__module__.endswith("transformer_engine"),
        "micro_batches": len(batch.microbatches),
        "positions": int(batch.microbatches[0].token_BS.numel()),
        "loss_rows": int(batch.microbatches[0].row_N.numel()),
        "phases": phases,
    }


def _config(name: str, folder: str) -> Config:
    config = find_recipe(name)
    model_shape(config.policy.hf_checkpoint).save_pretrained(folder)
    return override(config, [f"policy.hf_checkpoint={folder}"])


def _uniform_distributions() -> None:
    """Logits that were not computed have no maximum and no sum: those of a uniform distribution."""
    import torch

    from megatron_stare.numerics import vocab_kernels

    real = vocab_kernels.add_tile_

    def add_tile_(partial_nF: Any, tile_nv: Any, *rest: Any) -> None:
        real(partial_nF, tile_nv, *rest)
        with torch.no_grad():
            partial_nF[:, 0] = 0.0
            partial_nF[:, 1] += float(tile_nv.shape[1])

    vocab_kernels.add_tile_ = add_tile_


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # nothing of the device is worth taking down in order
