"""The z statistic over the steps of a run on a real SGLang server: mean and deviation.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/exactness.py
    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/exactness.py --steps 50 --cases fp32

If the server samples from the policy, exactness_z is N(0, 1) at every step and independent between
steps: over n steps the mean has the deviation 1 / sqrt(n), the deviation of z the error
1 / sqrt(2 n). A tiny random model trains STARE on a server that the run starts (`make sglang`); all
rollouts are trained, so that none is selected. The cases:

    fp32     trainer and server in fp32
    rounded  bf16; both have the same weights in FP8 blocks (policy.weight_quantization=fp8)
    fp8      bf16; the server's weights alone are rounded to FP8 blocks
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._measuring import machine
from megatron_stare.config import Config
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy.topology import session
from megatron_stare.reporting.logbook import read_metrics
from tests.rollout.sglang.world import make_model
from tests.small_run import small_config

SETTINGS = (
    "rollout.engine=sglang",
    "rollout.dynamic_sampling=false",
    "rollout.rollout_batch_size=8",
    "rollout.n_samples_per_prompt=4",
    "rollout.rollout_max_response_len=24",
    "policy.packed_sequences=true",
    "optimizer.lr=1e-4",  # a policy without entropy would have no z
    "sglang.sync_timeout=300",
)
CASES = {
    "fp32": ("policy.dtype=fp32",),
    "rounded": ("policy.dtype=bf16", "policy.weight_quantization=fp8", "sglang.weights=fp8"),
    "fp8": ("policy.dtype=bf16", "sglang.weights=fp8_uncorrected"),
}


def run_of(directory: Path, case: str, steps: int) -> Config:
    """The run of a case, with its model. Logits are wide: a temperature changes nothing of even
    ones.
    """
    wide = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 128, "num_hidden_layers": 2}
    model = make_model(directory / "wide", "qwen3", **wide)
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"] = 5 * weights["lm_head.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    more = (f"policy.hf_checkpoint={model}", f"train.num_rollout={steps}")
    return small_config(directory, *SETTINGS, *more, *CASES[case])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    arguments = parser.parse_args()
    console, table = Console(), Table(title=f"exactness_z, {arguments.steps} steps each")
    for name in (
        "case",
        "mean",
        "deviation",
        "beyond 2",
        "largest |z|",
        "gap [nats]",
        "|log-prob difference|",
    ):
        table.add_column(name, justify="right")
    for case in arguments.cases:
        with tempfile.TemporaryDirectory() as directory:
            config = run_of(Path(directory), case, arguments.steps)
            with session(config.policy, config.run.seed) as topology:
                assert Trainer(config, topology).run(Interrupt())
            rows = read_metrics(Path(config.run.dir) / "metrics.jsonl")
        z = [row["exactness_z"] for row in rows]
        table.add_row(
            case,
            f"{statistics.fmean(z):+.3f}",
            f"{statistics.stdev(z):.3f}",
            f"{sum(abs(each) > 2 for each in z) / len(z):.1%}",
            f"{max(map(abs, z)):.2f}",
            f"{statistics.fmean(row['exactness_gap'] for row in rows):+.1e}",
            f"{statistics.fmean(row['logprob_diff_mean'] for row in rows):.1e}",
        )
    console.print(table)
    console.print(machine(torch.device("cpu")))
    console.print(f"expected of an exact server: 0 +- {1 / arguments.steps**0.5:.3f} and 1")


if __name__ == "__main__":
    main()
