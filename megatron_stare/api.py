"""The Python interface. docs/python.md shows it; the command line runs through the same functions.

    from megatron_stare import evaluate, generate, load_config, train

    config = load_config("run.yaml", {"run.dir": "runs/mine", "train.num_rollout": 30})
    result = train(config)
    print(result.metrics()[-1]["reward"])

One call at a time per process: torch has one process group. Any thread may call; under torchrun
every rank calls the same function with the same arguments. Errors are UserError (something that
only the caller can correct) or RunAlarm (a fault that ended the run).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_stare.config import Config, RunAlarm, UserError, check_arms
from megatron_stare.config.environment import own_command, prepare_environment
from megatron_stare.recipes import config_of

if TYPE_CHECKING:
    from megatron_stare.loop.interrupt import Interrupt
    from megatron_stare.records import Group, Prompt
    from megatron_stare.reporting.problem_scores import Problem

__all__ = [
    "Config",
    "Evaluation",
    "RunAlarm",
    "TrainingResult",
    "UserError",
    "evaluate",
    "generate",
    "load_config",
    "train",
]
_SEED = 0x6E4  # no random number of training, evaluation or parity


@dataclass(frozen=True)
class TrainingResult:
    """A run after `train`: its directory, and whether it reached train.num_rollout. A run that an
    interrupt ended is not complete; the same call continues it.
    """

    directory: Path
    complete: bool

    def metrics(self, run: str = "") -> list[dict[str, Any]]:
        """One row per step, from metrics.jsonl. `run`: one of a comparison's, e.g. "seed0/stare".

        UserError: the directory has no such run.
        """
        from megatron_stare.reporting.logbook import read_metrics

        file = self.directory / run / "metrics.jsonl"
        if not file.is_file():
            every = (each.parent for each in sorted(self.directory.rglob("metrics.jsonl")))
            known = ", ".join(str(each.relative_to(self.directory)) for each in every)
            raise UserError(f"{file} does not exist; run must be one of: {known or 'none yet'}")
        return read_metrics(file)


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`: the metrics, the score of every problem by evaluation set, and the
    files that hold both.
    """

    metrics: dict[str, float]
    problems: dict[str, list[Problem]]
    files: tuple[Path, ...]


def load_config(source: str | Path, overrides: Mapping[str, Any] | Iterable[str] = ()) -> Config:
    """The configuration of a recipe, a YAML file or a run directory, with overrides applied.

    `overrides` maps dotted keys to values ({"optimizer.lr": 1e-6}), or lists them as the command
    line takes them (["optimizer.lr=1e-6"]). UserError: an unknown key, or a value that is not
    allowed.
    """
    if isinstance(overrides, str):
        raise UserError(f"overrides={overrides!r} must be a list of settings: [{overrides!r}]")
    if isinstance(overrides, Mapping):
        overrides = [f"{key}={_as_yaml(key, value)}" for key, value in overrides.items()]
    items = list(overrides)
    config = config_of(str(source), items)
    check_arms(config, items)
    return config


def train(
    config: Config,
    *,
    load: str = "latest",
    interrupt: Interrupt | None = None,
    force: bool = False,
) -> TrainingResult:
    """Start or resume a run, its cold start first, or a comparison if the configuration has arms.
    Collective.

    `load` chooses the checkpoint to resume from: "latest", "latest-good" (skips damaged ones),
    "best" (by run.keep_best) or a name such as "step_00000050". `interrupt.ask()`, from any thread,
    ends the run with a checkpoint; in the main thread Ctrl-C and SIGTERM do as well. `force` starts
    the runs of a comparison even if their plans do not fit the GPU.
    """
    from megatron_stare.compare.compare import check_load, compare
    from megatron_stare.loop import cold_start, run_directory
    from megatron_stare.loop.interrupt import Interrupt
    from megatron_stare.loop.resolve import check_ahead
    from megatron_stare.loop.trainer import Trainer
    from megatron_stare.loop.watchdog import Watchdog
    from megatron_stare.policy import topology as topologies
    from megatron_stare.reporting.report import keep_report

    check_load(config, load)
    _prepare(config)
    with (
        Watchdog(config.run) as watchdog,
        topologies.session(config.policy, config.run.seed) as topology,
        watchdog.naming_failures(),
        interrupt or Interrupt() as noted,
        run_directory.locked(Path(config.run.dir), enabled=topology.is_first),
    ):
        if cold_start.is_ahead(config) and not config.compare.arms:
            check_ahead(config)
        if config.compare.arms:
            complete = compare(config, topology, noted, own_command(), force)
        else:
            ready = cold_start.started(config, topology, noted)
            complete = ready is not None and Trainer(ready, topology, load).run(noted)
            if complete and topology.is_first:
                keep_report(Path(config.run.dir))
    return TrainingResult(Path(config.run.dir), complete)


def evaluate(config: Config, *, load: str = "latest") -> Evaluation:
    """avg@k, pass@k and majority@k of a checkpoint of run.dir (`load` as in `train`), or of
    policy.hf_checkpoint where the run has none, on evaluation.eval_data. Resumable. Collective.
    """
    from megatron_stare.loop.assemble import evaluate_checkpoint
    from megatron_stare.loop.evaluation import write_problems
    from megatron_stare.policy import topology as topologies
    from megatron_stare.system import atomic_write

    _prepare(config)
    with topologies.session(config.policy, config.run.seed) as topology:
        metrics, problems = evaluate_checkpoint(config, topology, load)
    if not topology.is_first:
        return Evaluation(metrics, problems, ())
    target = Path(config.run.dir) / "evaluation.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(target, json.dumps(metrics, indent=2) + "\n")
    return Evaluation(metrics, problems, (target, write_problems(problems, target.parent)))


def generate(
    config: Config,
    prompts: Sequence[str | Sequence[Mapping[str, Any]]],
    *,
    n: int = 1,
    temperature: float | None = None,
    max_new_tokens: int = 0,
    load: str = "latest",
) -> list[Group]:
    """`n` responses to every prompt, by a checkpoint of run.dir (`load` as in `train`), or by
    policy.hf_checkpoint where the run has none.

    A prompt is text or a list of chat messages; both become tokens as rows of data.prompt_data do
    (data.system_prompt, data.wrap_text, the chat template). Each group has the prompt and its
    rollouts; a rollout has `text`, `response_ids`, `logprobs` and `status`. Defaults are those of
    training: rollout.rollout_temperature and rollout.rollout_max_response_len. The same call gives
    the same responses on the embedded engine. Rewards are not computed. Collective; the groups are
    on the first rank, the other ranks return none.
    """
    from megatron_stare.collect.sampling_settings import training_params
    from megatron_stare.data.prompts import check_template
    from megatron_stare.loop.assemble import policy_engine
    from megatron_stare.loop.resolve import load_tokenizer, offered_tools
    from megatron_stare.policy import topology as topologies
    from megatron_stare.records import Group
    from megatron_stare.rollout.engine import Request
    from megatron_stare.rollout.engine import generate as rollouts_of

    if n < 1 or max_new_tokens < 0 or (temperature is not None and temperature < 0):
        raise UserError(
            f"generate: n={n} must be 1 or more, temperature={temperature} and "
            f"max_new_tokens={max_new_tokens} 0 or more"
        )
    tokenizer = load_tokenizer(config.policy.hf_checkpoint)
    check_template(tokenizer, config.data)
    tools = offered_tools(config)
    asked = [_prompt(text, place, tokenizer, config, tools) for place, text in enumerate(prompts)]
    params = training_params(config)
    params = dataclasses.replace(
        params,
        temperature=params.temperature if temperature is None else temperature,
        max_new_tokens=max_new_tokens or params.max_new_tokens,
    )
    _prepare(config)
    with (
        topologies.session(config.policy, config.run.seed) as topology,
        policy_engine(config, tokenizer, topology, load) as (engine, _),
    ):
        requests = [
            Request(prompt.token_ids, (config.run.seed, _SEED, prompt.index, sample), None, prompt)
            for prompt in asked
            for sample in range(n)
        ]
        rollouts = rollouts_of(engine, requests if topology.is_first else [], params)
    pairs = zip(asked, range(0, len(rollouts), n), strict=False)
    return [Group(prompt, tuple(rollouts[first : first + n])) for prompt, first in pairs]


def _prepare(config: Config) -> None:
    """What the environment of this process must say before CUDA and servers start."""
    from megatron_stare.planning.plan import share_memory

    prepare_environment(config.policy)
    share_memory(config)


def _as_yaml(key: str, value: Any) -> str:
    """A value as an override of the command line has it."""
    if isinstance(value, Path):
        value = str(value)
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError:
        raise UserError(f"{key}={value!r} is not a value of a setting") from None


def _prompt(
    given: str | Sequence[Mapping[str, Any]],
    place: int,
    tokenizer: Any,
    config: Config,
    tools: Sequence[Mapping[str, Any]],
) -> Prompt:
    from megatron_stare.data.prompts import tokenize
    from megatron_stare.data.rows import BadRow, Row

    content = given if isinstance(given, str) else [dict(message) for message in given]
    try:
        return tokenize(Row(place, content, "", {}), tokenizer, config.data, place, tools)
    except BadRow as error:
        raise UserError(f"prompt {place}: {error}") from None
