"""The execution of each benchmark of the pages: on a small case."""

from __future__ import annotations

from tests.docs.ways import SLOW, Run


def benchmark(*more: str, needs: tuple[str, ...] = SLOW, **rest: float) -> Run:
    """A benchmark on a small case."""
    return Run(more, markers=needs, seconds=rest.get("seconds", 600.0))


ONE_THREAD = "OMP_NUM_THREADS=1 .venv/bin/python benchmarks"
BENCHMARKS = {
    "OMP_NUM_THREADS=2 .venv/bin/python benchmarks/head.py --peers DIR --rounds 3": benchmark(
        *("--rows", "64", "--width", "64", "--vocabulary", "512", "--rounds", "1")
    ),
    ".venv/bin/python benchmarks/head.py --device cuda --dtype bfloat16 --rows 8192 --width 4096 "
    "--vocabulary 151936 --workspace-mib 768": benchmark(needs=("gpu", "slow")),
    f"{ONE_THREAD}/selection.py --rounds 5": benchmark("--rounds", "1", "--sizes", "1000"),
    f"{ONE_THREAD}/entropy_prediction.py": benchmark(
        *("--steps", "2", "--cold-start-steps", "2"), needs=("slow",)
    ),
    f"{ONE_THREAD}/train_step.py": benchmark(
        *("--width", "64", "--layers", "1", "--vocabulary", "512", "--sequences", "4"),
        *("--rounds", "1", "--steps", "2", "--cold-start-steps", "2"),
    ),
    f"{ONE_THREAD}/train_step.py --only-steps --sequences 48 --group 8 --prompts 38 38 "
    "--tokens 53 67": benchmark(
        *("--width", "64", "--layers", "1", "--vocabulary", "512", "--sequences", "8"),
        *("--rounds", "1"),
    ),
    f"{ONE_THREAD}/sampling.py --model models/smollm2-135m": benchmark(
        *("--sequences", "8", "--tokens", "4", "--rounds", "1", "--model", "")
    ),
    f"{ONE_THREAD}/long_sequence.py": benchmark("--tokens", "1024"),
    f"{ONE_THREAD}/planner.py": benchmark("--layouts", "TP2"),
    f"{ONE_THREAD}/convert.py --rounds 2": benchmark("--rounds", "1", "--layers", "1"),
    f"{ONE_THREAD}/scale.py": benchmark(
        *("--rollouts", "128", "--tokens", "300", "--servers", "2", "--worlds", "2"),
        *("--rounds", "1"),
    ),
    f"{ONE_THREAD}/long_tail.py": benchmark("--steps", "3", "--gpus", "32", "--over", "1.5"),
    f"{ONE_THREAD}/sandbox.py": benchmark("--calls", "10"),
    f"{ONE_THREAD}/verifiers.py --rows 600 --rounds 1": benchmark("--rows", "20"),
    f"{ONE_THREAD}/replay.py": benchmark("--steps", "9", "--set", "rollout.rollout_batch_size=4"),
    f"{ONE_THREAD}/agent_frameworks.py": benchmark(needs=("agents", "slow")),
    f"{ONE_THREAD}/endpoint.py": benchmark("--sessions", "4", "--turns", "2"),
    f"{ONE_THREAD}/tool_learning.py runs/ways": benchmark(
        *("--seeds", "0", "--last", "1", "--set", "cold_start.steps=30", "train.num_rollout=1"),
        *("rollout.rollout_batch_size=2", "rollout.dynamic_sampling=false"),
        needs=("agents", "slow"),
    ),
    f"{ONE_THREAD}/exactness.py": benchmark(
        *("--steps", "2", "--cases", "fp32"), needs=("sglang", "slow")
    ),
    f"{ONE_THREAD}/delta_sync.py": benchmark(*("--steps", "1", "--hidden", "64", "--layers", "1")),
    **{
        f"{ONE_THREAD}/servers.py --parts {part}": benchmark(
            *("--rounds", "1", "--requests", "4", "--mib", "64"), needs=("sglang", "slow")
        )
        for part in ("generate --rounds 7", "sync")
    },
    f"{ONE_THREAD}/asynchrony.py --engine embedded --steps 40 --modes on_policy one_step_off "
    "'one_step_off, ratio from 1' fully_async".replace("'", '"'): benchmark("--steps", "1"),
    f"{ONE_THREAD}/asynchrony.py --steps 26 --modes on_policy one_step_off "
    "--set rollout.rollout_batch_size=8 train.epochs=12 optimizer.lr=1e-4": benchmark(
        *("train.epochs=1", "--steps", "2"), needs=("sglang", "slow")
    ),
}
