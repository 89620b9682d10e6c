"""Builds what a configuration asks for: the parts of a run and of an evaluation without training;
an engine with a checkpoint's policy. Cheapest checks come first, so that bad input costs no model
load.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from megatron_stare.collect.journal import Journal, journal_directory
from megatron_stare.collect.judging import build_judge
from megatron_stare.collect.rollout_buffer import RolloutBuffer
from megatron_stare.collect.rollout_worker import RolloutWorker
from megatron_stare.collect.rounds import RolloutWorkers
from megatron_stare.collect.sampling_settings import episode_settings, is_streamed
from megatron_stare.config import Config, UserError, differences
from megatron_stare.data.prompts import prompts_digest
from megatron_stare.loop import run_directory
from megatron_stare.loop.evaluation import (
    EvaluationSet,
    Evaluator,
    build_sets,
)
from megatron_stare.loop.learn import Learner
from megatron_stare.loop.parity import Witness
from megatron_stare.loop.prepare import updates_per_rollout
from megatron_stare.loop.resolve import environments, load_tokenizer, offered_tools, resolve
from megatron_stare.policy import build, model_state, runtime
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.adapters import check as check_adapters
from megatron_stare.policy.checkpoints.checkpoints import CheckpointDirectory
from megatron_stare.policy.checkpoints.names import LATEST, step_of
from megatron_stare.policy.model import PolicyModel
from megatron_stare.policy.topology import Topology, agreed
from megatron_stare.records import Prompt
from megatron_stare.reporting import heartbeat
from megatron_stare.reporting.problem_scores import EVALUATION, Problem
from megatron_stare.rollout.embedded import EmbeddedEngine
from megatron_stare.rollout.engine import Engine
from megatron_stare.rollout.tools.engine import ToolEngine
from megatron_stare.scoring.judge import Judge
from megatron_stare.system import file_digest, raise_file_limit

# Of a model directory, next to its weights: all that decides what is sampled from them.
_MODEL_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    "chat_template.jinja",
)
# Settings, or their beginnings, that decide what is sampled from equal weights and prompts.
_OF_SERVERS = ("sglang.weights", "sglang.server_args")
_DECIDING = (
    *("policy.fp32_logits", "policy.weight_quantization", "data.chat_template_kwargs"),
    "sandbox.stateful",
)


class Parts(NamedTuple):
    """The parts of a training run."""

    actor: Actor
    engine: Engine
    collector: RolloutBuffer
    evaluator: Evaluator
    judge: Judge
    learner: Learner


def assemble(config: Config, topology: Topology) -> Parts:
    """All parts, ready for the first step except for the weights in the engine.
    UserError for whatever cannot work.
    """
    raise_file_limit()
    if topology.is_first:
        run_directory.changes_of(config)
    hf, objective, judge, tokenizer, stream, lines = resolve(config)
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(judge.close)
        build.transformer_config(hf, config.policy, topology)
        check_adapters(hf, config.adapters, config.policy)
        setting = "data.sources" if config.data.sources else "data.prompt_data"
        known = _same_on_all_ranks(setting, stream.prompts, topology)
        if topology.is_first:
            run_directory.claim_prompts(config, len(stream.prompts), known)
            for line in lines:
                print(line, flush=True)
        sets = evaluation_sets(config, tokenizer, topology)
        engine = build_engine(config, tokenizer, topology)
        on_failure.callback(engine.close)
        evaluator = Evaluator(config, sets, engine, judge, topology)
        actor = Actor(config, topology, config.train.num_rollout * updates_per_rollout(config))
        witness = Witness(config, actor, engine, stream, tokenizer)
        learner = Learner(config, objective, actor, tokenizer, witness)
        rollout_workers = _rollout_workers(config, engine, judge, topology)
        collector = RolloutBuffer(config, stream, engine, rollout_workers, topology)
        on_failure.pop_all()
        return Parts(actor, engine, collector, evaluator, judge, learner)


def evaluation_sets(
    config: Config, tokenizer: PreTrainedTokenizerBase, topology: Topology
) -> list[EvaluationSet]:
    """The sets of evaluation.eval_data; the first rank prints what there is to say about them."""
    sets, lines = build_sets(config, tokenizer, offered_tools(config))
    for one in sets:
        _same_on_all_ranks(f"evaluation.eval_data.{one.name}", one.prompts, topology)
    if topology.is_first:
        for line in lines:
            print(line, flush=True)
    return sets


def _same_on_all_ranks(setting: str, prompts: Sequence[Prompt], topology: Topology) -> str:
    """The prompts' digest. UserError: ranks have read other prompts, or in another order, so that
    some would be sampled twice and others never. Collective.
    """
    digests = topology.gather(prompts_digest(prompts))
    for rank, other in enumerate(digests):
        if other != digests[0]:
            raise UserError(
                f"{setting}: rank {rank} has read other prompts than rank 0, or in another order; "
                "a file must be the same on all nodes, and a function must return the same rows in "
                "every process"
            )
    return digests[0]


def build_engine(config: Config, tokenizer: PreTrainedTokenizerBase, topology: Topology) -> Engine:
    """The rollout engine, with tools or agents on the ranks that send it requests; weights not yet
    loaded. Collective; its user closes it.
    """
    if config.rollout.engine == "sglang":
        try:
            from megatron_stare.sync.served_engine import ServedEngine
        except ModuleNotFoundError as error:
            raise UserError(
                f"rollout.engine=sglang needs {error.name}; install megatron-stare[sglang]"
            ) from None
        engine: Engine = ServedEngine(config, tokenizer, topology)
    else:
        engine = embedded_engine(config, tokenizer, topology.world_size)
    playing = [engine]

    def start() -> None:
        """The other ranks would hold idle sandboxes and hosts, and find agents.port taken."""
        if topology.rank < engine.sources:
            playing.append(with_tools(engine, config, tokenizer))

    try:
        agreed(topology, start)
    except BaseException:
        playing[-1].close()
        raise
    return playing[-1]


def with_tools(engine: Engine, config: Config, tokenizer: PreTrainedTokenizerBase) -> Engine:
    """The engine; where there are tools or agents, one that plays episodes on it."""
    variables = config.data.chat_template_kwargs
    if config.agents.active:
        try:
            from megatron_stare.rollout.agents.agent_engine import AgentEngine
        except ModuleNotFoundError as error:
            raise UserError(f"agents need {error.name}; install megatron-stare[agents]") from None
        longest = _longest_sequence(config)
        agents = config.agents
        return AgentEngine(engine, tokenizer, agents, longest, variables, heartbeat.moved)
    if not config.tools.environment:
        return engine
    make, release = environments(config)
    return ToolEngine(engine, make, tokenizer, config.tools, release, variables)


def _longest_sequence(config: Config) -> int:
    """The most tokens of an agent's sequence: the model's limit, and what a rank can train."""
    length = int(build.read_hf_config(config.policy.hf_checkpoint).max_position_embeddings)
    only = config.policy.on_long_sequence == "error"
    return min(length, config.policy.sequence_budget) if only else length


def embedded_engine(
    config: Config, tokenizer: PreTrainedTokenizerBase, sources: int = 1
) -> EmbeddedEngine:
    """The engine of this process, on its device."""
    return EmbeddedEngine(
        config.policy.hf_checkpoint,
        tokenizer,
        config.rollout.engine_batch_size,
        build.DTYPES[config.policy.dtype],
        runtime.device(),
        sources,
        config.policy.fp32_logits,
        config.adapters.alpha / max(1, config.adapters.rank),
    )


def saved_policy(config: Config, topology: Topology, load: str) -> tuple[PolicyModel, int]:
    """The checkpoint of run.dir that `load` names (CheckpointDirectory.find), or
    policy.hf_checkpoint where the run has none, without optimizer and gradient buffers; and the
    step that it is of. Collective.
    """
    places = CheckpointDirectory(Path(config.run.dir) / "checkpoints", topology)
    found = places.find(load, claim=False)
    temperature = config.rollout.rollout_temperature
    source = (config.policy.hf_checkpoint, config.policy, topology, temperature)
    model = PolicyModel(*source, config.adapters, config.run.seed)
    if found:
        common = model_state.common_state(found)
        model.check_adapters(found, common.get("adapters", {}))
        model_state.into_model(model.chunks, found, topology)
    return model, step_of(found) if found else 0


@contextlib.contextmanager
def policy_engine(
    config: Config, tokenizer: PreTrainedTokenizerBase, topology: Topology, load: str = LATEST
) -> Iterator[tuple[Engine, PolicyModel]]:
    """An engine that holds the policy (`saved_policy`), and that policy; closed at the end.
    Collective.
    """
    with contextlib.closing(build_engine(config, tokenizer, topology)) as engine:
        model, step = saved_policy(config, topology, load)
        engine.load_weights(model.served_weights(), step)
        yield engine, model


def _rollout_workers(
    config: Config, engine: Engine, judge: Judge, topology: Topology
) -> RolloutWorkers:
    """One worker on every rank that the engine takes requests on; a stream always samples on rank
    0. A journal keeps finished rollouts, except those of a round of the embedded engine, which is
    sampled again: then the same prompts are decoded in one batch, and the run repeats itself.
    """
    streamed = is_streamed(config)
    ranks = range(1 if streamed else engine.sources)
    journaled = streamed or config.rollout.engine == "sglang"
    journal = Journal(journal_directory(config)) if journaled else None
    own = RolloutWorker(config, engine, judge, journal) if topology.rank in ranks else None
    return RolloutWorkers(ranks, own)


def policy_name(config: Config, weights: str) -> str:
    """The name of the policy that an evaluation samples: the hash of the weights, what else a model
    directory says about their use (shape, tokenizer, end of a response), the engine with the number
    formats of its servers, and its tools or agent. The step is not part of it: a run that went back
    and trained on again has other weights under the same number, and the same weights may have two
    numbers.
    """
    directory, engine = Path(config.policy.hf_checkpoint), config.rollout.engine
    files = {
        name: file_digest(directory / name) for name in _MODEL_FILES if (directory / name).is_file()
    }
    deciding = _DECIDING + _OF_SERVERS * (engine == "sglang")
    changed = {
        key: value for key, _, value in differences(Config(), config) if key.startswith(deciding)
    }
    name = [weights, files, engine, config.policy.dtype, episode_settings(config)]
    return json.dumps([*name, changed] if changed else name)


def evaluate_checkpoint(
    config: Config, topology: Topology, load: str
) -> tuple[dict[str, float], dict[str, list[Problem]]]:
    """Evaluate the checkpoint of run.dir that `load` names, or policy.hf_checkpoint where the run
    has none. Builds no optimizer and no gradient buffers. Collective.

    The metrics, and the problems of every set.
    """
    if not config.evaluation.eval_data:
        raise UserError(
            "evaluation.eval_data is empty; give evaluation.eval_data.<name>=<file.jsonl or "
            ".parquet>"
        )
    directory = Path(config.run.dir)
    tokenizer, judge = load_tokenizer(config.policy.hf_checkpoint), build_judge(config)
    with contextlib.ExitStack() as ending:
        ending.callback(judge.close)
        sets = evaluation_sets(config, tokenizer, topology)
        engine = build_engine(config, tokenizer, topology)
        ending.callback(engine.close)
        evaluator = Evaluator(config, sets, engine, judge, topology)
        model, step = saved_policy(config, topology, load)
        engine.load_weights(model.served_weights(), step)
        name = policy_name(config, model.fingerprint())
        metrics = evaluator.evaluate(step, directory / EVALUATION, name)
        return {"step": step} | metrics, evaluator.problems
