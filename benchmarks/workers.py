"""CPU milliseconds of a rollout in the trainer's process and in worker processes.

Fake servers answer with as many tokens as asked for, in pieces, as real ones do; the judge's reward
costs nothing. Processor time is what the system counts for a process with all its threads, over one
round of sampling after a first that warms up. The servers' own time is not in it.

    python benchmarks/workers.py --tokens 32768 --rollouts 128 --workers 0 1 2
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_stare.collect.process_worker import ProcessWorker
from megatron_stare.config import Config, override
from megatron_stare.loop.assemble import assemble
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.topology import Topology
from tests.rollout.sglang.fake_server import fake_servers
from tests.tiny_models import save_tokenizer, tiny_config, write_checkpoint

SAMPLES = 8


def free(response: str, label: str, metadata: dict[str, object]) -> float:
    """A reward that costs nothing."""
    return float(len(response) % 2)


def settings(directory: Path, urls: Sequence[str], tokens: int, rollouts: int) -> Config:
    """A run of one tiny model, whose context has room for the tokens."""
    model, problems = directory / "model", directory / "problems.jsonl"
    if not problems.exists():
        shape = {"vocab_size": 257, "eos_token_id": 0, "max_position_embeddings": tokens + 64}
        write_checkpoint(model, tiny_config("qwen2", **shape))
        save_tokenizer(model)
        rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(9) for b in range(9)]
        problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return override(
        Config(),
        [
            f"policy.hf_checkpoint={model}",
            f"policy.max_tokens_per_gpu={tokens + 64}",
            f"data.prompt_data={problems}",
            "data.rollout_max_prompt_len=32",
            f"rollout.rollout_batch_size={rollouts // SAMPLES}",
            f"rollout.n_samples_per_prompt={SAMPLES}",
            f"rollout.rollout_max_response_len={tokens}",
            "rollout.dynamic_sampling=false",
            "rollout.engine=sglang",
            f"sglang.urls=[{','.join(urls)}]",
            "sglang.sync_method=tensor",
            "sglang.verify_weights=false",
            "scoring.reward=benchmarks.workers.free",
        ],
    )


def measured(config: Config, topology: Topology) -> dict[str, float]:
    """Milliseconds per rollout: of this process, of all workers together; and seconds."""
    parts = assemble(config, topology)
    closing = contextlib.closing
    with closing(parts.judge), closing(parts.engine), closing(parts.collector):
        parts.engine.load_weights(parts.actor.weights(), 0)
        parts.collector.collect(0)
        shares = [s for s in parts.collector.workers.own if isinstance(s, ProcessWorker)]
        began = time.perf_counter()
        own, theirs = time.process_time(), sum(map(processor_seconds, shares))
        collected = parts.collector.collect(1)
        count = sum(len(group.rollouts) for group in collected.groups)
        tokens = sum(each.length for group in collected.groups for each in group.rollouts)
        return {
            "trainer": 1e3 * (time.process_time() - own) / count,
            "workers": 1e3 * (sum(map(processor_seconds, shares)) - theirs) / count,
            "seconds": time.perf_counter() - began,
            "tokens": tokens / count,
        }


def processor_seconds(share: ProcessWorker) -> float:
    """The clock of a process with all its threads, as the kernel names it for another process."""
    return time.clock_gettime((~share.process.pid << 3) | 2)


def main() -> None:
    """Print a row for each number of workers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 1, 2])
    options = parser.parse_args()
    table = Table(title="CPU ms per rollout")
    for name in ("workers", "tokens of a rollout", "trainer's process", "worker processes"):
        table.add_column(name, justify="right")
    lengths = {"shortest": options.tokens - 64, "longest": options.tokens - 64}
    with (
        tempfile.TemporaryDirectory() as directory,
        fake_servers(options.servers, **lengths) as urls,
        topologies.session(Config().policy) as topology,
    ):
        base = settings(Path(directory), urls, options.tokens, options.rollouts)
        for workers in options.workers:
            own = [f"rollout.workers_per_node={workers}", f"run.dir={directory}/run_{workers}"]
            found = measured(override(base, own), topology)
            figures = (found["tokens"], found["trainer"], found["workers"])
            table.add_row(str(workers), *(f"{figure:.1f}" for figure in figures))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
