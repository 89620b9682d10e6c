"""A teacher on a real server: its log-probs, and a run that equals one with the teacher in the
trainer.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

from megatron_stare.config import SGLangConfig, dump
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy.topology import Topology
from megatron_stare.reporting.logbook import read_metrics
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.rollout.sglang.reference import read_logprobs
from tests.paths import ROOT
from tests.rollout.sglang.test_sglang_agents import logprobs
from tests.rollout.sglang.world import TOLERANCE, VOCABULARY, make_model
from tests.small_run import small_config

pytestmark = pytest.mark.sglang


def test_a_server_reads_what_transformers_reads(pool: SGLangPool, checkpoint: Path) -> None:
    draw = numpy.random.default_rng(0)
    sequences = [draw.integers(1, VOCABULARY, n).astype(numpy.int32) for n in (2, 9, 30, 64)]
    sequences += [sequences[-1]]  # whose prefix is in the server's cache
    found = read_logprobs([pool.servers[0].client.url], SGLangConfig(), VOCABULARY, sequences)
    for ids, values in zip(sequences, found, strict=True):
        expected = logprobs(checkpoint, ids.tolist())
        torch.testing.assert_close(torch.tensor(values), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_served_teacher_trains_like_one_in_the_trainer(
    ranks: int, pool: SGLangPool, checkpoint: Path, tmp_path: Path, topology: Topology
) -> None:
    student = make_model(tmp_path / "student", "qwen2", seed=9)
    settings = (
        *(f"policy.hf_checkpoint={student}", f"policy.ref_hf_checkpoint={checkpoint}"),
        *("loss.distillation_coef=0.5", "loss.name=dapo", "rollout.dynamic_sampling=false"),
        "train.num_rollout=2",
    )
    own = small_config(tmp_path / "own", *settings)
    assert Trainer(own, topology).run(Interrupt())
    url = f"sglang.reference_urls=[{pool.servers[0].client.url}]"
    served = small_config(tmp_path / "served", *settings, url)
    if ranks == 1:
        assert Trainer(served, topology).run(Interrupt())
    else:
        dump(served, tmp_path / "config.yaml")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(ranks), "-m", "megatron_stare", "train"]
        command = [*launcher, str(tmp_path / "config.yaml")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    first, second = (read_metrics(Path(one.run.dir) / "metrics.jsonl") for one in (own, served))
    for here, there in zip(first, second, strict=True):
        assert here["reference_kl"] > 0.01, "the teacher is another model"
        for key in ("reference_kl", "loss", "grad_norm", "entropy"):
            assert there[key] == pytest.approx(here[key], rel=1e-3, abs=1e-5), key
