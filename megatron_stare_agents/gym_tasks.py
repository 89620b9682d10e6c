"""Tasks of reasoning-gym as episodes of one turn, scored in the host by the task's own scorer.

settings: {"name": "chain_sum", "size": 500, "seed": 0, ...}: the name of a data set, and what
reasoning_gym.create_dataset takes. The answer is what stands in the last <answer>...</answer>; a
response without one scores as no answer. Data sets whose scorer refuses their own answer are
refused by name.

The trainer can also read and score these tasks itself: data.prompt_data=reasoning_gym:chain_sum.
"""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request

# Without a byte from a server. The endpoint sends heartbeats; an opponent may never answer.
_SILENT_SECONDS = 1800.0
ASKED = "\n\nGive the final answer between <answer> and </answer>."


def rows(settings):
    """A row per task. ValueError: the data set cannot be learnt."""
    import reasoning_gym

    settings = dict(settings)
    name = settings.pop("name")
    dataset = reasoning_gym.create_dataset(name, **settings)
    first = json.loads(json.dumps(dataset[0], default=str))
    score = reasoning_gym.get_score_answer_fn(name)(first["answer"], first)
    if score < 1:
        raise ValueError(f"the scorer of {name} gives the data set's own answer {score:g}")
    for entry in dataset:
        messages = [{"role": "user", "content": entry["question"] + ASKED}]
        metadata = {"reasoning_gym": name, "entry": entry}
        yield {"prompt": messages, "label": str(entry["answer"]), "metadata": metadata}


async def run(row, endpoint):
    """One call, and its score."""
    import reasoning_gym

    answer = await asyncio.to_thread(ask, endpoint, {"messages": row.messages})
    said = answer.get("content") or ""
    found = said.rpartition("<answer>")[2] if "<answer>" in said else None
    found = found.partition("</answer>")[0].strip() if found is not None else None
    score = reasoning_gym.get_score_answer_fn(row.metadata["reasoning_gym"])
    return {
        "reward": float(score(found, row.metadata["entry"])),
        "metrics": {"answered": found is not None},
    }


async def next_turn(endpoint, body):
    """As `ask`, without blocking the loop; None: a limit of the episode is reached."""
    try:
        return await asyncio.to_thread(ask, endpoint, body)
    except urllib.error.HTTPError as error:
        if error.code != 400:
            raise
        return None


def ask(endpoint, body):
    """The message that the model answers with, over the standard library alone. HTTPError, with the
    endpoint's words: it refuses the call; 400 where a limit of the episode is reached.
    """
    request = urllib.request.Request(
        f"{endpoint.base_url}/chat/completions",
        json.dumps({"model": endpoint.model, **body}).encode(),
        {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=_SILENT_SECONDS) as answer:
            return json.load(answer)["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        error.msg = f"{error.msg} {error.read().decode(errors='replace')[:1000]}"
        raise
