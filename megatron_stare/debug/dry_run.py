"""`train SOURCE --dry-run`: checks everything that can be checked before a run, one line per check.

The checks cover the settings, the objective, the tokenizer, every row of the data, the verifier,
the names and shapes in the checkpoint, the layout and the planned memory, tools, servers, disk and
the run directory. The command reads no weights, trains nothing and leaves no file.
"""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from megatron_stare.collect.judging import build_judge
from megatron_stare.config import Config, UserError
from megatron_stare.data.mixture import training_stream
from megatron_stare.data.prompts import prompts_digest
from megatron_stare.debug.doctor import Finding, disk, nearest_place, servers
from megatron_stare.loop import cold_start, run_directory
from megatron_stare.loop.evaluation import build_sets
from megatron_stare.loop.prepare import effective_loss
from megatron_stare.loop.resolve import (
    check_environment,
    check_settings,
    environments,
    load_tokenizer,
    offered_tools,
)
from megatron_stare.losses import objective_of
from megatron_stare.planning.machine import H100, whole_gpu
from megatron_stare.planning.plan import GIB, fewest_ranks, make_plan
from megatron_stare.policy import build
from megatron_stare.policy.checkpoints.names import (
    BEST,
    LATEST,
    LATEST_GOOD,
    best_in,
    listed,
    require_named,
)
from megatron_stare.policy.huggingface.checkpoint import Checkpoint, check_agreement
from megatron_stare.policy.huggingface.names import name_table
from megatron_stare.recipes import Cluster, cluster_of
from megatron_stare.records import Prompt
from megatron_stare.scoring.judge import EPISODE
from megatron_stare.scoring.verdict import Sample


def dry_run(source: str, config: Config, runs: Mapping[str, Config], load: str) -> int:
    """Print one line per check as it is done, and return the number of faults.

    `runs`: the runs that `config` would train, by arm (compare.on_paper). The objective is checked
    for every arm, everything else for the first arm only. `load`: the checkpoint of --load.
    """
    faults = 0
    for finding in _findings(source, config, runs, load):
        print(finding.line(), flush=True)
        faults += finding.level == "FAIL"
    print("nothing was trained" + (f"; {faults} to be put right" if faults else "; all is ready"))
    return faults


def _findings(
    source: str, config: Config, runs: Mapping[str, Config], load: str
) -> Iterator[Finding]:
    first = next(iter(runs.values()))
    for arm, run in runs.items():
        yield _look(f"objective{arm and f' of {arm}'}", _objective, run)
    yield _look("checkpoint", _checkpoint, first)
    yield _look("memory", _memory, source, first)
    found: list[PreTrainedTokenizerBase] = []
    yield _look("tokenizer", _tokenizer, first, found)
    if found:
        prompts: list[Prompt] = []
        if cold_start.is_due(first):
            yield _look("cold start", _cold_start, first)
        yield _look("data", _data, first, found[0], prompts)
        yield _look("evaluation", _evaluation, first, found[0])
        firsts = {first.scoring.deciding(each.metadata): each for each in reversed(prompts)}
        for reward in sorted(firsts.keys() - {EPISODE}):
            yield _verifier(first, reward, firsts[reward])
    if first.agents.active:
        yield _look("agents", _agents, first)
    if first.tools.environment:
        yield _look("tools", _tools, first, prompts)
    yield from servers(first)
    yield from disk(first, len(runs) * max(1, len(config.compare.seeds)))
    yield _look("run.dir", _place, runs.get("", config), runs)
    if load not in (LATEST, LATEST_GOOD):
        yield _look("--load", _load, config, load)


def _look(what: str, look: Callable[..., str], *arguments: Any) -> Finding:
    try:
        return Finding("OK", what, look(*arguments))
    except UserError as error:
        return Finding("FAIL", what, str(error))


def _objective(run: Config) -> str:
    return objective_of(effective_loss(run)).name


def _checkpoint(run: Config) -> str:
    """Check the names and shapes of all tensors, from the headers of the files, and that the model
    supports the configured lengths.
    """
    lines = []
    for directory in dict.fromkeys(filter(None, [run.policy.hf_checkpoint, run.reference])):
        hf = build.read_hf_config(directory)
        check_settings(run, hf.max_position_embeddings)
        check_agreement(Checkpoint(directory), hf)
        tensors = sum(len(entry.hf) for entry in name_table(hf))
        lines.append(f"{directory}: {hf.model_type}, {tensors} tensors as config.json has them")
    return "; ".join(lines)


def _memory(source: str, run: Config) -> str:
    """The planned layout and memory, for the GPUs of this machine as a start judges them, else for
    H100s. The number of ranks is that of torchrun, else the recipe's number of GPUs, else that of
    one copy of the model.
    """
    known, given = cluster_of(source), os.environ.get("WORLD_SIZE")
    ranks = int(given or (known.trainer_gpus if known else fewest_ranks(run.policy)))
    count = len(run.sglang.urls) or run.sglang.num_servers
    machine, gpu = H100, "an 80 GB GPU"
    if torch.cuda.is_available():
        size = torch.cuda.get_device_properties(0).total_memory
        machine, gpu = whole_gpu(size), f"the {size / GIB:.1f} GiB of this GPU"
    plan = make_plan(run, Cluster(ranks, count * run.sglang.gpus_per_server), machine)
    if plan.faults:
        fewest = (
            f"; this is the plan of {ranks} rank{'s' * (ranks > 1)}, one copy of the model: start "
            "`train --dry-run` by torchrun to plan for all ranks"
        )
        raise UserError(plan.faults[0] + fewest * (not given and not known))
    peak = f"{plan.worst.peak / GIB:.2f} GiB of {gpu} at the peak"
    return f"{ranks} rank{'s' * (ranks > 1)}, {peak}, {plan.host_bytes / GIB:.0f} GiB on the host"


def _tokenizer(run: Config, found: list[PreTrainedTokenizerBase]) -> str:
    found.append(load_tokenizer(run.policy.hf_checkpoint))
    template = "a chat template" if found[0].chat_template else "no chat template"
    return f"{len(found[0])} tokens, {template}"


def _cold_start(run: Config) -> str:
    rows = cold_start.read_demonstrations(run)
    lengths = [len(one.prompt.token_ids) + one.rollouts[0].length for one in rows]
    steps, size = run.cold_start.steps, run.cold_start.batch_size
    found = f"{len(rows)} demonstrations of {min(lengths)} to {max(lengths)} tokens"
    return f"{found}, {steps} steps of {size}"


def _data(run: Config, tokenizer: PreTrainedTokenizerBase, prompts: list[Prompt]) -> str:
    stream, lines = training_stream(run, tokenizer, offered_tools(run))
    prompts += stream.prompts
    run_directory.check_prompts(run, len(prompts), prompts_digest(prompts))
    lengths = [len(prompt.token_ids) for prompt in prompts]
    found = f"{len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens"
    return "; ".join([found, *lines])


def _evaluation(run: Config, tokenizer: PreTrainedTokenizerBase) -> str:
    sets, lines = build_sets(run, tokenizer, offered_tools(run))
    found = [f"{each.name}: {len(each.prompts)} problems x {each.samples}" for each in sets]
    return "; ".join([*found, *lines]) or "none (evaluation.eval_data is empty)"


def _verifier(run: Config, reward: str, prompt: Prompt) -> Finding:
    """Check that the verifier can judge the label of its first row as if it were a response."""
    what = f"verifier {reward}"
    try:
        with closing(build_judge(run)) as judge:
            asked = (prompt.label, dict(prompt.metadata), prompt.text)
            sample = Sample(prompt.label, *asked, messages=prompt.messages)
            (verdict,) = judge.verdicts([sample])
    except UserError as error:
        return Finding("FAIL", what, str(error))
    if verdict.value is None:
        remedy = "look at the label, or at what the verifier needs"
        return Finding("WARN", what, f"cannot judge the first label: {verdict.reason}", remedy)
    return Finding(
        "OK", what, f"the first label as a response is {verdict.verdict}, {verdict.value:g}"
    )


def _tools(run: Config, prompts: list[Prompt]) -> str:
    for prompt in prompts[:1]:
        check_environment(run, prompt)
    _, release = environments(run)
    release()
    names = [str(tool.get("function", tool).get("name", "")) for tool in offered_tools(run)]
    return f"{run.tools.environment}: {', '.join(names) or 'tools of each episode'}"


def _agents(run: Config) -> str:
    """Start a host, which loads the agent."""
    from megatron_stare.rollout.agents.hosts import check_agent

    check_agent(run.agents)
    where = run.agents.python or "the trainer's Python"
    return f"{run.agents.function or shlex.join(run.agents.command)}, loaded in {where}"


def _place(config: Config, runs: Mapping[str, Config]) -> str:
    """Check that the run directory can be written, and say whether it has a run to continue."""
    directory = Path(config.run.dir)
    try:
        with tempfile.TemporaryFile(dir=nearest_place(directory)):
            pass
    except OSError as error:
        raise UserError(
            f"{directory} cannot be written ({error.strerror}); choose another run.dir"
        ) from None
    if not (directory / run_directory.CONFIG_NAME).is_file():
        return f"{directory} would be a new run"
    changes = run_directory.changes_of(config)
    changed = ", ".join(f"{key}: {old!r} -> {new!r}" for key, (old, new) in changes.items())
    return f"{directory} would be continued" + (f" with {changed}" if changed else "")


def _load(config: Config, load: str) -> str:
    """Check that the run has the checkpoint; its files are read by a start."""
    directory = Path(config.run.dir) / "checkpoints"
    name = best_in(directory)[0] if load == BEST else load
    require_named(load, name, directory, [path.name for path in reversed(listed(directory))])
    return f"{name} of {directory}"
