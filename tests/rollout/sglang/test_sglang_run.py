"""The main job on real servers: trainer TP2 under torchrun, weights by gloo broadcast,
checksums equal.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_stare.collect.batch import Collected
from megatron_stare.config import Config, dump
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Prompt, Rollout
from megatron_stare.reporting.logbook import read_metrics
from megatron_stare.rollout.sglang.process import ServerProcess
from tests.collect.test_rollout_buffer_replay import UEC
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


def batches_of(config: Config, topology: Topology) -> list[list[tuple[Prompt, Rollout]]]:
    """The batch of each step of a run."""
    trainer, batches = Trainer(config, topology), []
    collect = trainer.collector.collect

    def noted(step: int) -> Collected:
        found = collect(step)
        batches.append([(group.prompt, one) for group in found.groups for one in group.rollouts])
        return found

    trainer.collector.collect = noted  # type: ignore[method-assign]
    assert trainer.run(Interrupt())
    return batches


def check_first_step(
    batch: list[tuple[Prompt, Rollout]], checkpoint: Path, temperature: float
) -> None:
    """Rollouts of another temperature are there, with the model's log-probs at it."""
    again = [(prompt, one) for prompt, one in batch if one.temperature is not None]
    assert again and {one.temperature for _, one in again} == {temperature}
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    for prompt, one in again:
        ids = torch.tensor([[*prompt.token_ids.tolist(), *one.response_ids.tolist()]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt.token_ids) - 1 : -1] / temperature
        expected = torch.log_softmax(logits, -1).gather(1, ids[0, -one.length :, None])[:, 0]
        assert numpy.abs(expected.numpy() - one.logprobs).max() < TOLERANCE


def test_prompts_sampled_again_have_log_probs_of_their_temperature(
    server: ServerProcess, checkpoint: Path, tmp_path: Path, topology: Topology
):
    """Metrics that compare the engine with the policy leave them out; otherwise they would see far
    more than rounding.
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
    check_first_step(batches_of(config, topology)[0], checkpoint, 1.2)
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [row["resampling_temperature"] for row in rows] == [1.2, 1.2]
    assert all(row["logprob_diff_max"] < TOLERANCE for row in rows)


def seldom_right(response: str, label: str, metadata: dict[str, Any]) -> float:
    """1 for one response in six, so that of 16 prompts some have none: a server draws by itself."""
    return float(sum(response.encode()) % 6 == 0)


def test_a_queue_of_rollouts_is_filled_by_a_server_and_trained_again(
    server: ServerProcess, checkpoint: Path, tmp_path: Path, topology: Topology
):
    """UEC-RL: rollouts wait for a batch, some at another temperature; buffered ones are trained
    once more against the trainer's own log-probs, without a request to the server.
    """
    config = small_config(
        tmp_path,
        "rollout.engine=sglang",
        f"sglang.urls=[{server.url}]",
        f"policy.hf_checkpoint={checkpoint}",
        *UEC,
        "rollout.rollout_batch_size=16",
        "rollout.resampling.samples=8",
        "rollout.resampling.min_resampled_advantage=0.05",
        "rollout.resampling.replay_advantage=0.05",
        "scoring.reward=tests.rollout.sglang.test_sglang_run.seldom_right",
        "train.num_rollout=6",
        VERIFY,
    )
    batches = batches_of(config, topology)
    check_first_step(batches[0], checkpoint, 1.1)
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    turns = ["replayed_rollouts" in row for row in rows]
    assert any(turns) and not all(turns) and "logprob_diff_max" in rows[0]
    for row, turn, batch in zip(rows, turns, batches, strict=True):
        assert len(batch) % 64 == 0 and len(batch) >= 64
        assert all(one.scored == turn for _, one in batch)
        assert turn or row.get("logprob_diff_max", 0.0) < TOLERANCE  # none: all of it had waited
        assert turn == ("generation_rounds" not in row)


def test_a_failed_start_of_a_server_is_one_line(tmp_path: Path):
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
