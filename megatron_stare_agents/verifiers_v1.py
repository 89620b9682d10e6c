"""Tasksets of verifiers 0.4 (verifiers.v1) as episodes: every harness, with the endpoint as model.

settings: {"environment": {...}, "path": "directory to import from", "client": {...}}. `environment`
is what verifiers' resolve_env_config takes, e.g.

    {"taskset": {"id": "calculator_taskset"},
     "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}

`client` may be missing. With {"type": "train", "renderer_model_name": ..., "renderer": {}}, which
has the fields of its TrainClientConfig, verifiers tokenises and sends token ids.

The reward is the trace's. A trace with an error has none, and one that ran out of time is
truncated.
"""

from __future__ import annotations

import asyncio
import itertools
import json

from megatron_stare_agents.rows import use_path

_open = {}  # settings -> a future of the environment and its tasks, and the task that serves


def rows(settings):
    """A row per task."""
    import verifiers.v1 as vf

    use_path(settings)
    config = vf.resolve_env_config(settings["environment"])
    for number, task in enumerate(vf.load_taskset(config.taskset)):
        prompt = task.data.prompt
        messages = (
            prompt if isinstance(prompt, list) else [{"role": "user", "content": str(prompt)}]
        )
        label = str(getattr(task.data, "answer", "") or "")
        where = {"settings": settings, "task": number}
        yield {"prompt": messages, "label": label, "metadata": {"verifiers": where}}


async def run(row, endpoint):
    """The outcome of one episode."""
    return outcome_of(await episode_of(row, endpoint))


async def episode_of(row, endpoint):
    """One episode, as verifiers gives it."""
    import verifiers.v1 as vf

    where = row.metadata["verifiers"]
    env, tasks = await _opened(where["settings"])
    root, asked = endpoint.base_url.removesuffix("/v1"), where["settings"].get("client", {})
    kind = vf.TrainClientConfig if asked.get("type") == "train" else vf.EvalClientConfig
    client = kind(
        base_url=f"{root}/s/{endpoint.api_key}/v1", api_key_var="MEGATRON_STARE_NO_KEY", **asked
    )
    context = vf.ModelContext(model=endpoint.model, client=client)
    return await env.run_episode(tasks[where["task"]], context)


def outcome_of(episode):
    """The outcome of an episode, as the trainer takes it."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors or not episode.traces or not all(trace.ok for trace in episode.traces):
        said = [f"{getattr(error, 'type', type(error).__name__)}: {error}" for error in errors]
        kind = getattr(errors[0], "type", "error") if errors else "no_trace"
        return {"failed": str(kind), "message": "; ".join(said)[:2000]}
    rewards = [trace.reward for trace in episode.traces]
    numbers = {}
    for trace in episode.traces:
        if not trace.rewards or None in trace.rewards.values():  # it would count as 0
            return {"failed": "no_reward", "message": "verifiers gave no reward"}
        parts = {name: part.value for name, part in trace.rewards.items()}
        numbers |= {
            name: value for name, value in trace.metrics.items() if value is not None
        } | parts
    truncated = any(trace.is_timeout for trace in episode.traces)
    reward = sum(rewards) / len(rewards)
    return {"reward": reward, "metrics": numbers, "truncated": truncated}


class _Tasks:
    """The tasks of a taskset by number; some tasksets have no end."""

    def __init__(self, taskset):
        self._rest, self._known = iter(taskset), []

    def __getitem__(self, number):
        missing = number + 1 - len(self._known)
        self._known += itertools.islice(self._rest, max(0, missing))
        return self._known[number]


async def _opened(settings):
    """The environment of these settings, which serves until this process ends."""
    key = json.dumps(settings, sort_keys=True)
    if key not in _open:
        ready = asyncio.get_running_loop().create_future()
        # the task that enters `serving` must live as long as it: its cancel scopes are the task's
        _open[key] = ready, asyncio.ensure_future(_serve(key, settings, ready))
    return await asyncio.shield(_open[key][0])


async def _serve(key, settings, ready):
    try:
        import verifiers.v1 as vf

        use_path(settings)
        config = vf.resolve_env_config(settings["environment"])
        env = vf.load_environment(config)
        async with env.serving():
            ready.set_result((env, _Tasks(vf.load_taskset(config.taskset))))
            await asyncio.Event().wait()
    except BaseException as error:
        del _open[key]  # the next episode tries again
        if ready.done():
            raise
        ready.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
