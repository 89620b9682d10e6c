"""K2: training steps on the GPU against the CPU, layouts against one rank, repeated bits.

Every run is a process of its own: three updates of a tiny random model on made-up tokens, from
which rank 0 writes its metrics.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

from megatron_stare.commands.gpuday.models import TINY, TINY_EXPERTS, random_model
from megatron_stare.commands.gpuday.results import Day, Measurement, Verdict, holds, within
from megatron_stare.commands.gpuday.stages import ON_CPU, checked, ranks
from megatron_stare.config import Config, override
from megatron_stare.losses import find_objective
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.actor import Actor
from megatron_stare.records import Group, Prompt, Rollout

COMPARED = ("loss", "grad_norm", "entropy", "surprisal", "chosen_positive")
PACKED, BF16 = "policy.packed_sequences=true", "policy.dtype=bf16"
SHARED = "policy.shared_prompts=true"
TP = "policy.tensor_model_parallel_size=2"
SP = "policy.sequence_parallel=true"
PP = "policy.pipeline_model_parallel_size=2"
CP2, CP4 = (f"policy.context_parallel_size={size}" for size in (2, 4))
EP = "policy.expert_model_parallel_size=2"
# name: ranks, whether it has experts, overrides
LAYOUTS = {
    "TP2 SP packed": (2, False, (TP, SP, PACKED)),
    "CP2 packed": (2, False, (CP2, PACKED)),
    "PP2 packed": (2, False, (PP, PACKED)),
    "TP2 EP2 experts": (2, True, (TP, SP, EP, PACKED)),
    "CP4 packed": (4, False, (CP4, PACKED)),
}
DETERMINISTIC = "policy.deterministic=true"
FP32, HALF = 2e-4, 5e-2  # relative, of metrics after three updates
# TransformerEngine multiplies fp32 on a GPU with 10 bits of mantissa otherwise.
EXACT = {"NVIDIA_TF32_OVERRIDE": "0"}


def run(day: Day) -> Iterator[Measurement]:
    """Metrics of each run against those of one rank on the CPU in fp32."""
    models = {
        0: random_model(day, "tiny", "Qwen3-8B", TINY),
        4: random_model(day, "tiny-experts", "Qwen3-30B-A3B", TINY_EXPERTS),
    }
    if day.rehearsal:
        del models[4]
    cpu = {experts: _metrics(day, models[experts], "cpu", 1, (), ON_CPU) for experts in models}
    cases = {"one rank, padded": (1, False, ()), "one rank, packed": (1, False, (PACKED,))}
    cases["one rank, shared prompts"] = (1, False, (PACKED, SHARED))
    cases |= {} if day.rehearsal else {"experts": (1, True, (PACKED,))}
    most = max(2, day.gpus) if day.rehearsal else day.gpus
    wanted = ("TP2 SP packed",) if day.rehearsal else tuple(LAYOUTS)
    cases |= {name: LAYOUTS[name] for name in wanted if LAYOUTS[name][0] <= most}
    for name, (count, has_experts, options) in cases.items():
        experts = 4 * has_experts
        found = _metrics(day, models[experts], name, count, options, EXACT)
        yield from _compared(f"{name}, fp32", found, cpu[experts], FP32)
    yield from _compared("bf16", _metrics(day, models[0], "bf16", 1, (PACKED, BF16)), cpu[0], HALF)
    yield from _repeated(day, models[0])


def _compared(
    name: str, found: list[dict[str, float]], reference: list[dict[str, float]], limit: float
) -> Iterator[Measurement]:
    both = list(zip(found, reference, strict=True))
    for key in COMPARED:
        if key in reference[0]:
            far = [abs(a[key] - b[key]) / max(abs(b[key]), 1e-3) for a, b in both]
            yield within(f"{name}: {key} against the CPU", max(far), limit)


def _repeated(day: Day, model: Path) -> Iterator[Measurement]:
    """Two runs in bf16, with launches that the host waits for and without: races and atomics."""
    for name, options in (("as shipped", ()), ("policy.deterministic", (DETERMINISTIC,))):
        first, second = (
            _metrics(day, model, f"bits {name} {wait}", 1, (PACKED, BF16, *options), wait)
            for wait in ({"CUDA_LAUNCH_BLOCKING": "1"}, {"CUDA_LAUNCH_BLOCKING": "0"})
        )
        otherwise: Verdict = "FAIL" if options else "WARN"
        yield holds(f"{name}: bits of two runs are equal", first == second, otherwise=otherwise)


def _metrics(
    day: Day,
    model: Path,
    name: str,
    count: int,
    options: tuple[str, ...],
    environment: dict[str, str] | None = None,
) -> list[dict[str, float]]:
    """The metrics of three updates by `count` ranks."""
    file = day.path / "steps.json"
    file.unlink(missing_ok=True)
    print(f"--- {name}", flush=True)
    command = ranks("equal", count, str(file), f"policy.hf_checkpoint={model}", *options)
    checked(command, **(environment or {}))
    found: list[dict[str, float]] = json.loads(file.read_text())
    return found


def groups(count: int, vocabulary: int) -> list[Group]:
    """`count` groups of two responses of 49 and 30 made-up tokens, one right and one wrong."""
    draw = numpy.random.default_rng(0)

    def rollout(advantage: float, length: int) -> Rollout:
        return Rollout(
            response_ids=draw.integers(1, vocabulary, length).astype(numpy.int32),
            logprobs=numpy.full(length, -6.0, numpy.float32),
            loss_mask=numpy.ones(length, bool),
            status="completed",
            weight_version=0,
            advantage=advantage,
        )

    return [
        Group(
            Prompt(number, draw.integers(1, vocabulary, 15).astype(numpy.int32), label=""),
            (rollout(1.0, 49), rollout(-1.0, 30)),
        )
        for number in range(count)
    ]


def updates(options: list[str]) -> tuple[bool, list[dict[str, float]]]:
    """The metrics of three updates; whether this rank is the first."""
    settings = ["policy.dtype=fp32", "policy.max_tokens_per_gpu=128", "optimizer.lr=1e-3"]
    settings += ["policy.packed_sequences=false", "loss.name=stare", *options]
    config = override(Config(), settings)
    objective, found = find_objective(config.loss.name), []
    with topologies.session(config.policy, config.run.seed) as topology:
        actor = Actor(config, topology, 10)
        for _ in range(3):
            scored = actor.score(actor.pack(groups(4, 500), 0), sensitivity=True)
            signals = objective.plan(scored, config.loss, topology.across, {})
            metrics, _ = actor.update(scored, objective.bind(config.loss), signals)
            across, chosen = topology.across, signals.metrics
            assert scored.entropy_T is not None and scored.surprisal_T is not None
            measured: dict[str, Any] = {
                "entropy": across.mean(scored.entropy_T),
                "surprisal": across.mean(scored.surprisal_T),
            }
            found.append({**metrics, **chosen, **measured})
            actor.make_room()
    return topology.is_first, found


if __name__ == "__main__":
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    is_first, steps = updates(sys.argv[2:])
    if is_first:
        Path(sys.argv[1]).write_text(json.dumps(steps))
