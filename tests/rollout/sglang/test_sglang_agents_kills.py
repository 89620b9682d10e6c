"""A run of agents whose processes are killed twenty times: servers, the agents' host, the worker
process and verifiers. What it trains equals an undisturbed run.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from megatron_stare.config import Config, dump
from megatron_stare.loop.record import recorded_groups
from megatron_stare.loop.run_directory import read_head, records_directory
from megatron_stare.records import Rollout
from tests.rollout.sglang.test_sglang_agents import chat_model
from tests.rollout.sglang.world import NEWER
from tests.small_run import rows_of, small_config

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.skipif(not NEWER, reason="0.5.9 forgets its seeds"),
]

PROMPTS, SAMPLES, TURNS = 32, 4, 4
# Three workers in a row that bring no group end a run, which is right.
KILLS = {"server": 6, "host": 6, "verifier": 6, "worker": 2}
SECONDS, OLD_SECONDS = 900.0, 4.0
SETTINGS = (
    *("rollout.engine=sglang", "sglang.num_servers=2", "sglang.deterministic=true"),
    *("sglang.health_interval=0.5", "sglang.max_restarts=100", "sglang.max_concurrency=4"),
    *("agents.function=tests.rollout.agents.programs.talks", "agents.hosts=2"),
    "agents.episodes_per_host=4",
    *("scoring.reward=tests.rewards.even_characters", "scoring.function_timeout=20"),
    *("data.input_key=messages", "data.rollout_max_prompt_len=64"),
    "rollout.rollout_max_response_len=48",
    *(f"rollout.rollout_batch_size={PROMPTS}", f"rollout.n_samples_per_prompt={SAMPLES}"),
    *("rollout.dynamic_sampling=false", "policy.max_tokens_per_gpu=512"),
    *("train.num_rollout=1", "run.record=all"),
)


def kind_of(process: psutil.Process) -> str:
    """Which of KILLS the process is; "" if none."""
    with contextlib.suppress(psutil.Error):
        words, parent = process.cmdline(), process.parent()
        line = " ".join(words)
        if (
            "--model-path" in words
            and parent is not None
            and "--model-path" not in parent.cmdline()
        ):
            return "server"
        if "megatron_stare_agents" in line:
            return "host"
        if (
            "forkserver" in line
            and parent is not None
            and "forkserver" in " ".join(parent.cmdline())
        ):
            return "worker"
        if "-P" in words and "verifier" in line:
            return "verifier"
    return ""


def start(directory: Path, name: str, checkpoint: Path) -> tuple[Config, subprocess.Popen[bytes]]:
    problems = directory / "agents.jsonl"
    rows = [
        {
            "messages": [{"role": "user", "content": f"{number}*7="}],
            "label": str(7 * number),
            "metadata": {"turns": TURNS},
        }
        for number in range(PROMPTS)
    ]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    places = (f"policy.hf_checkpoint={checkpoint}", f"data.prompt_data={problems}")
    config = small_config(directory, *SETTINGS, *places, f"run.dir={directory / name}")
    dump(config, directory / f"{name}.yaml")
    command = [sys.executable, "-m", "megatron_stare", "train", str(directory / f"{name}.yaml")]
    log = (directory / f"{name}.txt").open("wb")
    return config, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def kill_some(config: Config, run: subprocess.Popen[bytes]) -> Counter[str]:
    """Kill processes of the run at random moments, in a random order."""
    moments, killed, deadline = random.Random(3), Counter[str](), time.monotonic() + SECONDS
    kinds = [kind for kind, times in KILLS.items() for _ in range(times)]
    moments.shuffle(kinds)
    while kinds and run.poll() is None and time.monotonic() < deadline:
        time.sleep(moments.uniform(0.2, 2.0))
        children = psutil.Process(run.pid).children(recursive=True)
        # Three starts in a row that end before they are ready end a run, too.
        old = [child for child in children if time.time() - child.create_time() > OLD_SECONDS]
        if victims := [child for child in old if kind_of(child) == kinds[-1]]:
            with contextlib.suppress(psutil.Error):
                moments.choice(victims).kill()
                killed[kinds.pop()] += 1
    return killed


def trained(config: Config) -> dict[tuple[str, int], Rollout]:
    """The rollouts of the step, by prompt and number."""
    directory = records_directory(Path(config.run.dir))
    groups = recorded_groups(directory, read_head(directory, 1))
    return {
        (group.prompt.label, number): rollout
        for group in groups
        for number, rollout in enumerate(group.rollouts)
        if isinstance(rollout, Rollout)
    }


def test_twenty_kills_change_no_token_and_no_reward(tmp_path: Path):
    checkpoint = chat_model(tmp_path / "chat")
    plain, run = start(tmp_path, "plain", checkpoint)
    assert run.wait(SECONDS) == 0, (tmp_path / "plain.txt").read_text()[-3000:]
    disturbed, run = start(tmp_path, "disturbed", checkpoint)
    processes: list[psutil.Process] = []
    try:
        killed = kill_some(disturbed, run)
        if run.poll() is None:
            processes = psutil.Process(run.pid).children(recursive=True)
        assert run.wait(SECONDS) == 0, (tmp_path / "disturbed.txt").read_text()[-3000:]
    finally:
        run.kill()
    print(f"killed: {dict(killed)}")
    assert killed == KILLS
    wanted, found = trained(plain), trained(disturbed)
    assert len(found) == len(wanted) == PROMPTS * SAMPLES and found.keys() == wanted.keys()
    # An episode whose host was killed in both of its tries is unverifiable, and never wrong.
    kept = {key: rollout for key, rollout in found.items() if "failed/host" not in rollout.episode}
    lost = [rollout for key, rollout in found.items() if key not in kept]
    assert all(one.verdict == "unverifiable" and one.reward is None for one in lost)
    print(f"episodes lost with their hosts: {len(lost)}")
    assert len(kept) > 0.6 * len(found)
    for key, rollout in kept.items():
        assert rollout.response_ids.tolist() == wanted[key].response_ids.tolist(), key
        assert rollout.loss_mask.tolist() == wanted[key].loss_mask.tolist(), key
        assert rollout.reward == wanted[key].reward and rollout.verdict == wanted[key].verdict, key
        assert "errors" not in rollout.episode
    assert rows_of(disturbed)[-1]["engine_restarts"] >= 1
    assert processes and not psutil.wait_procs(processes, timeout=30)[1], "no process is left"
