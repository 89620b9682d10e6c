"""The parts that training, evaluation and the cold start share:
the tokenizer, the rollout engine, the policy of a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_stare.collect.process_worker import WorkerProcesses
from megatron_stare.config import Config, UserError
from megatron_stare.policy import build, model_state, runtime
from megatron_stare.policy.checkpoints.checkpoints import LATEST, CheckpointDirectory
from megatron_stare.policy.checkpoints.names import step_of
from megatron_stare.policy.model import PolicyModel
from megatron_stare.policy.topology import Topology
from megatron_stare.rollout.embedded import EmbeddedEngine
from megatron_stare.rollout.engine import Engine
from megatron_stare.rollout.sandbox.fusion import open_sandbox
from megatron_stare.rollout.tools.builtin import (
    CalculatorEnvironment,
    PythonEnvironment,
    python_environments,
)
from megatron_stare.rollout.tools.calls import Tool
from megatron_stare.rollout.tools.engine import ToolEngine
from megatron_stare.rollout.tools.environment import MakeEnvironment, find_environment

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def build_engine(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    topology: Topology,
    workers: WorkerProcesses | None = None,
) -> Engine:
    """The rollout engine, with tools where there are any; weights not yet loaded. Collective;
    its user closes it. What it does concerns the `workers` too.
    """
    if config.rollout.engine == "sglang":
        try:
            from megatron_stare.sync.served_engine import ServedEngine
        except ModuleNotFoundError as error:
            raise UserError(
                f"rollout.engine=sglang needs {error.name}; install megatron-stare[sglang]"
            ) from None
        announce = workers.announce if workers else None
        return with_tools(ServedEngine(config, tokenizer, topology, announce), config, tokenizer)
    engine = embedded_engine(config, tokenizer, topology.world_size)
    if workers is not None:
        engine.follower = workers.load_weights
    return with_tools(engine, config, tokenizer)


def with_tools(engine: Engine, config: Config, tokenizer: PreTrainedTokenizerBase) -> Engine:
    """The engine; where there are tools or agents, one that plays episodes on it."""
    variables = config.data.chat_template_kwargs
    if config.agents.active:
        try:
            from megatron_stare.rollout.agents.agent_engine import AgentEngine
        except ModuleNotFoundError as error:
            raise UserError(f"agents need {error.name}; install megatron-stare[agents]") from None
        longest = _longest_sequence(config)
        return AgentEngine(engine, tokenizer, config.agents, longest, variables)
    if not config.tools.environment:
        return engine
    make, release = environments(config)
    return ToolEngine(engine, make, tokenizer, config.tools, release, variables)


def _longest_sequence(config: Config) -> int:
    """The most tokens of an agent's sequence: the model's limit, and what a rank can train."""
    length = int(build.read_hf_config(config.policy.hf_checkpoint).max_position_embeddings)
    only = config.policy.on_long_sequence == "error"
    return min(length, config.policy.sequence_budget) if only else length


def offered_tools(config: Config) -> Sequence[Tool]:
    """The tools of prompts without tools of their own:
    those that every episode of the environment has.

    None where tools differ between episodes, and none for code in a turn, which is not a call that
    a template describes.
    """
    name = config.tools.environment
    if not name or config.tools.format == "code":
        return ()
    own = {"python": PythonEnvironment, "calculator": CalculatorEnvironment}
    found = getattr(own.get(name) or find_environment(name), "tools", ())
    return found if isinstance(found, Sequence) else ()


def environments(config: Config) -> tuple[MakeEnvironment, Callable[[], None]]:
    """The function that makes a prompt's environment, and one that closes their shared parts."""
    name = config.tools.environment
    if name == "python":
        runner = open_sandbox(config.sandbox)
        return python_environments(runner, config.sandbox.stateful), runner.close
    return (CalculatorEnvironment if name == "calculator" else find_environment(name)), lambda: None


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


@contextmanager
def policy_engine(
    config: Config, tokenizer: PreTrainedTokenizerBase, topology: Topology, load: str = LATEST
) -> Iterator[tuple[Engine, PolicyModel]]:
    """An engine that holds the policy (`saved_policy`), and that policy; closed at the end.
    Collective.
    """
    with closing(build_engine(config, tokenizer, topology)) as engine:
        model, step = saved_policy(config, topology, load)
        engine.load_weights(model.served_weights(), step)
        yield engine, model


def has_tokenizer(directory: str) -> bool:
    """Whether files of a tokenizer are in an HF directory."""
    return any((Path(directory) / name).is_file() for name in _TOKENIZER_FILES)


def load_tokenizer(directory: str) -> PreTrainedTokenizerBase:
    """The tokenizer of an HF directory; UserError where there is none.

    The files are looked for first: transformers makes up an empty tokenizer where they are missing.
    """
    if not has_tokenizer(directory):
        raise UserError(
            f"{directory}: no tokenizer there; copy tokenizer.json and tokenizer_config.json to it"
        )
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(
            f"{directory}: no usable tokenizer ({first}); copy tokenizer.json and its config there"
        ) from None
