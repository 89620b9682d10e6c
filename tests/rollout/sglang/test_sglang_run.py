"""The main job on real servers: trainer TP2 under torchrun, weights by gloo broadcast,
checksums equal.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_stare.config import dump
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy.topology import Topology
from megatron_stare.reporting.logbook import read_metrics
from megatron_stare.rollout.sglang.process import ServerProcess
from tests.paths import ROOT
from tests.rollout.sglang.world import CHECKSUMS, TOLERANCE, VERIFY
from tests.small_run import small_config

pytestmark = pytest.mark.sglang
STEPS = 20


def run(launcher: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [*launcher, "-m", "megatron_stare", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )


@pytest.mark.slow
def test_twenty_steps_with_tensor_parallel_trainer_and_a_launched_server(tmp_path: Path):
    """Every sync compares checksums (sglang.verify_weights) and raises where they differ."""
    settings = (
        "rollout.engine=sglang",
        "policy.tensor_model_parallel_size=2",
        f"train.num_rollout={STEPS}",
    )
    dump(
        small_config(tmp_path, *settings, "sglang.sync_timeout=120", VERIFY),
        tmp_path / "config.yaml",
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = run(torchrun, "train", str(tmp_path / "config.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    compared = [row["logprob_diff_max"] for row in rows if "logprob_diff_max" in row]
    assert len(compared) >= STEPS - 1 and max(compared) < TOLERANCE
    assert len({row["surprisal"] for row in rows}) == STEPS, "the policy moved"
    assert all(row["engine_restarts"] == row["engine_fault_status"] == 0 for row in rows)
    log = (tmp_path / "run/servers/sglang_0.log").read_text()
    assert log.count('"POST /update_weights_from_distributed') >= STEPS
    assert not CHECKSUMS or log.count('"POST /weights_checker') >= STEPS


def test_an_attached_run_evaluates_too(server: ServerProcess, checkpoint: Path, tmp_path: Path):
    problems = small_config(tmp_path).data.prompt_data
    settings = (
        "rollout.engine=sglang",
        f"sglang.urls=[{server.url}]",
        f"policy.hf_checkpoint={checkpoint}",
    )
    evaluation = (f"evaluation.eval_data.sums={problems}", "evaluation.n_samples_per_eval_prompt=2")
    dump(small_config(tmp_path, *settings, *evaluation, VERIFY), tmp_path / "config.yaml")
    done = run([sys.executable], "evaluate", str(tmp_path / "config.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "avg_at_k" in (tmp_path / "run/evaluation.json").read_text()


def test_prompts_sampled_again_have_log_probs_of_their_temperature(
    server: ServerProcess, checkpoint: Path, tmp_path: Path, topology: Topology
):
    """As the model has them at that temperature; what compares the engine with the policy leaves
    them out, or it would see far more than rounding.
    """
    config = small_config(
        tmp_path,
        "rollout.engine=sglang",
        f"sglang.urls=[{server.url}]",
        f"policy.hf_checkpoint={checkpoint}",
        "rollout.resampling.method=aepo",
        "rollout.resampling.target_entropy=10",
        "rollout.resampling.prompt_share=1",
        "train.num_rollout=2",
        VERIFY,
    )
    trainer, batches = Trainer(config, topology), []
    collect = trainer.collector.collect
    trainer.collector.collect = lambda step: batches.append(collect(step)) or batches[-1]  # type: ignore[func-returns-value,method-assign]
    assert trainer.run(Interrupt())
    pairs = [(group.prompt, one) for group in batches[0].groups for one in group.rollouts]
    again = [(prompt, one) for prompt, one in pairs if one.temperature is not None]
    assert again and {one.temperature for _, one in again} == {1.2}
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    for prompt, one in again:
        ids = torch.tensor([[*prompt.token_ids.tolist(), *one.response_ids.tolist()]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt.token_ids) - 1 : -1] / 1.2
        expected = torch.log_softmax(logits, -1).gather(1, ids[0, -one.length :, None])[:, 0]
        assert numpy.abs(expected.numpy() - one.logprobs).max() < TOLERANCE
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [row["resampling_temperature"] for row in rows] == [1.2, 1.2]
    assert all(row["logprob_diff_max"] < TOLERANCE for row in rows)


def test_a_server_that_cannot_start_is_one_line(tmp_path: Path):
    dump(
        small_config(tmp_path, "rollout.engine=sglang", "sglang.command=/bin/false"),
        tmp_path / "config.yaml",
    )
    done = run([sys.executable], "train", str(tmp_path / "config.yaml"))
    assert done.returncode == 2, done.stdout + done.stderr
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .startswith("error: an SGLang server ended while starting")
    )
