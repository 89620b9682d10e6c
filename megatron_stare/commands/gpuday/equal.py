"""K2: training steps on the GPU against the CPU, layouts against one rank, repeated bits.

Every run has processes of its own: three updates of a tiny random model on made-up tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy
import torch

from megatron_stare.commands.gpuday.models import TINY, TINY_EXPERTS, made_up_rollout, random_model
from megatron_stare.commands.gpuday.results import Day, Measurement, Verdict, holds, within
from megatron_stare.commands.gpuday.stages import ON_CPU, on_ranks
from megatron_stare.config import Config, override
from megatron_stare.loop.learn import Learner
from megatron_stare.loop.metrics import Stopwatch
from megatron_stare.losses import find_objective
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.actor import Actor
from megatron_stare.records import Group, Prompt

COMPARED = ("loss", "grad_norm", "entropy", "surprisal", "chosen_positive")
TP = "tensor_model_parallel_size=2"
SP = "sequence_parallel=true"
# name: ranks, model, fields of `policy`
CASES: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "one rank, padded": (1, "tiny", ("packed_sequences=false",)),
    "one rank, packed": (1, "tiny", ()),
    "one rank, shared prompts": (1, "tiny", ("shared_prompts=true",)),
    "experts": (1, "tiny-experts", ()),
    "TP2 SP packed": (2, "tiny", (TP, SP)),
    "CP2 packed": (2, "tiny", ("context_parallel_size=2",)),
    "PP2 packed": (2, "tiny", ("pipeline_model_parallel_size=2",)),
    "TP2 EP2 experts": (2, "tiny-experts", (TP, SP, "expert_model_parallel_size=2")),
    "CP4 packed": (4, "tiny", ("context_parallel_size=4",)),
}
REHEARSED = (*list(CASES)[:3], "TP2 SP packed")
BF16, DETERMINISTIC = "dtype=bf16", "deterministic=true"
FP32, HALF = 2e-4, 5e-2  # relative, of metrics after three updates
# TransformerEngine multiplies fp32 on a GPU with 10 bits of mantissa otherwise.
EXACT = {"NVIDIA_TF32_OVERRIDE": "0"}
Steps = list[dict[str, float]]  # metrics


def run(day: Day) -> Iterator[Measurement]:
    """Metrics of each run against those of one rank on the CPU in fp32."""
    checkpoints = {"tiny": random_model(day, "tiny", "Qwen3-8B", TINY)}
    if not day.rehearsal:
        experts = random_model(day, "tiny-experts", "Qwen3-30B-A3B", TINY_EXPERTS)
        checkpoints["tiny-experts"] = experts

    def steps(
        name: str, count: int, model: str, fields: tuple[str, ...], environment: dict[str, str]
    ) -> Steps:
        print(f"--- {name}", flush=True)
        settings = [f"policy.{field}" for field in fields]
        settings.append(f"policy.hf_checkpoint={checkpoints[model]}")
        return on_ranks(count, environment, updates, settings)

    padded = CASES["one rank, padded"][2]
    cpu = {model: steps(f"{model}, CPU", 1, model, padded, ON_CPU) for model in checkpoints}
    for name, (count, model, fields) in CASES.items():
        wanted = name in REHEARSED if day.rehearsal else count <= max(1, day.gpus)
        if wanted:
            found = steps(name, count, model, fields, EXACT)
            yield from _compared(f"{name}, fp32", found, cpu[model], FP32)
    found = steps("bf16", 1, "tiny", (BF16,), {})
    yield from _compared("bf16", found, cpu["tiny"], HALF)
    # Races and atomics show in two runs, with launches that the host waits for and without.
    for name, fields in (("as shipped", ()), ("policy.deterministic", (DETERMINISTIC,))):
        first, second = (
            steps(f"bits {name}", 1, "tiny", (BF16, *fields), {"CUDA_LAUNCH_BLOCKING": blocking})
            for blocking in "10"
        )
        otherwise: Verdict = "FAIL" if fields else "WARN"
        yield holds(f"{name}: bits of two runs are equal", first == second, otherwise=otherwise)


def _compared(name: str, found: Steps, reference: Steps, limit: float) -> Iterator[Measurement]:
    for key in COMPARED:
        if key in reference[0]:
            far = [
                abs(one[key] - other[key]) / max(abs(other[key]), 1e-3)
                for one, other in zip(found, reference, strict=True)
            ]
            yield within(f"{name}: {key} against the CPU", float(numpy.max(far)), limit)


def updates(settings: list[str]) -> Steps:
    """The metrics of three updates on this rank."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    common = ["policy.dtype=fp32", "policy.max_tokens_per_gpu=128", "optimizer.lr=1e-3"]
    common += ["policy.packed_sequences=true", "loss.name=stare"]
    config = override(Config(), [*common, *settings])
    with topologies.session(config.policy, config.run.seed) as topology:
        actor = Actor(config, topology, 10)
        learner = Learner(config, find_objective(config.loss.name), actor)
        found = []
        for _ in range(3):
            result = learner.step(groups(4, 500), 0, True, Stopwatch())
            if result.error:
                raise result.error
            found.append(result.metrics)
            actor.make_room()
    return found


def groups(count: int, vocabulary: int) -> list[Group]:
    """`count` groups of two responses of 49 and 30 made-up tokens, one right and one wrong."""
    draw = numpy.random.default_rng(0)
    return [
        Group(
            Prompt(number, draw.integers(1, vocabulary, 15).astype(numpy.int32), label=""),
            tuple(
                made_up_rollout(draw.integers(1, vocabulary, length), advantage)
                for advantage, length in ((1.0, 49), (-1.0, 30))
            ),
        )
        for number in range(count)
    ]
