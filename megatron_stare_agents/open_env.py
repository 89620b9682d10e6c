"""Environments of OpenEnv as episodes: a web socket of the environment's server per episode.

settings: {"url": "http://127.0.0.1:8000", "reset": {...}, "system": "text", "steps": 32,
"reward": "sum" | "last", "count": 1000}. The model gets the first observation as a user's message
and one tool `step`, whose parameters are the environment's action schema; each observation answers
a call. An action that the server refuses is answered by its error, and the episode continues; a
turn without a call ends it. A lost server is an error of the episode, which then has no reward.

`reset` of a row also gets {"seed": number of the row}. Needs the package websockets.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request

from megatron_stare_agents.gym_tasks import next_turn

_HIDDEN = ("metadata",)  # of an action: for the environment's own use


def rows(settings):
    """A row per seed."""
    text = settings.get("system") or "Act by calling the tool `step`."
    for seed in range(settings.get("count", 1000)):
        where = {"settings": settings, "seed": seed}
        yield {
            "prompt": [{"role": "user", "content": text}],
            "label": "",
            "metadata": {"openenv": where},
        }


async def run(row, endpoint):
    """One episode."""
    from websockets.asyncio.client import connect

    where = row.metadata["openenv"]
    settings = where["settings"]
    url = settings["url"].rstrip("/")
    tools = [await asyncio.to_thread(_tool, url)]
    rewards, metrics = [], {"refused_actions": 0}
    async with connect(f"ws{url.removeprefix('http')}/ws", max_size=None) as socket:
        asked = {"seed": where["seed"], **settings.get("reset", {})}
        begun = await _exchange(socket, "reset", asked)
        messages = [*row.messages, {"role": "user", "content": _shown(begun)}]
        done, steps = begun.get("done", False), 0
        while not done and steps < settings.get("steps", 32):
            turn = await next_turn(endpoint, {"messages": messages, "tools": tools})
            if turn is None:
                break  # what was reached counts
            messages.append(turn)
            if not turn.get("tool_calls"):
                break
            for call in turn["tool_calls"]:
                if done:
                    break
                steps += 1
                text, found = await _step(socket, call)
                if found is None:
                    metrics["refused_actions"] += 1
                else:
                    rewards.append(found.get("reward") or 0.0)
                    done = bool(found.get("done"))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        await socket.send(json.dumps({"type": "close"}))
    total = sum(rewards) if settings.get("reward", "sum") == "sum" else (rewards or [0.0])[-1]
    return {"reward": total, "metrics": {**metrics, "steps": steps}, "truncated": not done}


async def _step(socket, call):
    """The message to the model, and the observation; None: the action was refused."""
    try:
        action = json.loads(call["function"]["arguments"])
    except ValueError as error:
        return f"Error: the arguments are no JSON ({error})", None
    try:
        found = await _exchange(socket, "step", action)
    except ValueError as error:
        return f"Error: {error}", None
    return _shown(found), found


async def _exchange(socket, kind, data):
    """The data of an answer. ValueError: the server refuses what it was sent."""
    await socket.send(json.dumps({"type": kind, "data": data}))
    answer = json.loads(await socket.recv())
    if answer["type"] == "error":
        if kind != "step" or answer["data"].get("code") not in ("VALIDATION_ERROR", "INVALID_JSON"):
            raise RuntimeError(f"the environment failed: {json.dumps(answer['data'])[:500]}")
        raise ValueError(json.dumps(answer["data"].get("errors") or answer["data"]["message"]))
    return answer["data"]


def _shown(found):
    return json.dumps(found.get("observation", {}))


def _tool(url):
    with urllib.request.urlopen(f"{url}/schema", timeout=30) as answer:
        schema = dict(json.load(answer)["action"])
    fields = schema.get("properties", {})
    schema["properties"] = {name: field for name, field in fields.items() if name not in _HIDDEN}
    about = schema.pop("description", "") or "Takes a step in the environment."
    function = {"name": "step", "description": about, "parameters": schema}
    return {"type": "function", "function": function}
