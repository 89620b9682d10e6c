"""Environments of verifiers up to 0.1 (`load_environment`) as episodes.

settings: {"id": "calculator_env", "args": {...}, "count": -1, "seed": 0, "path": "directory to
import from", "client_type": "openai_chat_completions"}. Everything but `id` may be missing. The
reward is the rollout's; a rollout with an error has none.
"""

from __future__ import annotations

import json
import os

from megatron_stare_agents.rows import use_path

_loaded, _loaded_rows = {}, {}  # in the main thread: verifiers sets signal handlers
_clients = {}
KEY = "MEGATRON_STARE_NO_KEY"  # the session is in the address


def rows(settings):
    """A row per example of the environment's data set."""
    for number, example in enumerate(_examples(settings)):
        prompt = example["prompt"]
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        where = {"settings": settings, "example": number}
        label = str(example.get("answer") or "")
        yield {"prompt": messages, "label": label, "metadata": {"verifiers": where}}


async def run(row, endpoint):
    """One rollout of one example."""
    where = row.metadata["verifiers"]
    settings = where["settings"]
    example = _examples(settings)[where["example"]]
    client = _client(settings.get("client_type", "openai_chat_completions"), endpoint)
    env = _environment(settings)
    (found,) = await env.run_group([example], client, endpoint.model, {}, state_columns=[])
    if found.get("error"):
        return {"failed": "verifiers", "message": str(found["error"])[:2000]}
    numbers = found.get("metrics") or {}
    truncated = found.get("stop_condition") in ("max_turns_reached", "prompt_too_long")
    return {"reward": found["reward"], "metrics": numbers, "truncated": truncated}


def _client(kind, endpoint):
    """A client of this session. All share the connections of one: to make those takes longer than
    an episode, because of the certificates that no connection here needs.
    """
    import verifiers as vf
    from verifiers.clients import resolve_client

    root = endpoint.base_url.removesuffix("/v1")
    if kind not in _clients:
        os.environ.setdefault(KEY, "none")
        config = vf.ClientConfig(client_type=kind, api_base_url=root, api_key_var=KEY)
        _clients[kind] = resolve_client(config)
    shared = _clients[kind]
    return type(shared)(shared.client.with_options(base_url=f"{root}/s/{endpoint.api_key}/v1"))


def _environment(settings):
    key = json.dumps(settings, sort_keys=True)
    if key not in _loaded:
        import verifiers as vf

        use_path(settings)
        _loaded[key] = vf.load_environment(settings["id"], **settings.get("args", {}))
    return _loaded[key]


def _examples(settings):
    key = json.dumps(settings, sort_keys=True)
    if key not in _loaded_rows:
        data = _environment(settings).get_dataset(settings.get("count", -1), settings.get("seed"))
        _loaded_rows[key] = data.to_list()
    return _loaded_rows[key]
