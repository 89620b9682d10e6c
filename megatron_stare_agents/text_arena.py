"""Games of TextArena as episodes: the policy is one player, other models are the others.

settings: {"game": "TicTacToe-v0", "players": 2, "opponent": {"base_url": "http://127.0.0.1:30000/v1",
"model": "default", "api_key": "none"}, "unfinished": -1.0, "count": 1000}. `opponent` is any server
of OpenAI's chat completions; its tokens are not trained. With the policy's own SGLang server it is
self-play, in which each role has episodes of its own. A game of one player needs no opponent.

The reward is the policy's in the game. In the rows the policy is each player in turn, so that the
rows of one seed are all roles of one game. `unfinished` is the reward of a game that a limit of the
episode ended. A failure of the opponent is an error of the episode, which then has no reward.
"""

from __future__ import annotations

import asyncio
import types

from megatron_stare_agents.gym_tasks import ask, next_turn

_ASKED = "Give your move in the form that the game asks for."


def rows(settings):
    """A row per player and seed. ImportError, KeyError: no such game."""
    import textarena

    players = settings.get("players", 2)
    textarena.make(env_id=_raw(settings))
    for number in range(settings.get("count", 1000)):
        seed, role = divmod(number, players)
        where = {"settings": settings, "seed": seed, "player": role}
        prompt = [{"role": "user", "content": _ASKED}]
        yield {"prompt": prompt, "label": "", "metadata": {"text_arena": where}}


async def run(row, endpoint):
    """One game."""
    import textarena

    where = row.metadata["text_arena"]
    settings, role = where["settings"], where["player"]
    opponent = types.SimpleNamespace(**{"api_key": "none", **settings.get("opponent", {})})
    game = textarena.make(env_id=_raw(settings))
    # It seeds the module `random`, which all games of this process share.
    game.reset(num_players=settings.get("players", 2), seed=where["seed"])
    talks, ended = {}, False
    while not ended:
        player, seen = game.get_observation()
        text = _shown(player, seen)
        talk = talks.setdefault(player, [])
        talk.append({"role": "user", "content": text if talk else f"{_ASKED}\n\n{text}"})
        if player == role:
            turn = await next_turn(endpoint, {"messages": talk})
        else:
            turn = await asyncio.to_thread(ask, opponent, {"messages": talk})
        if turn is None:
            return {"reward": settings.get("unfinished", -1.0), "truncated": True}
        talk.append(turn)
        ended, _ = game.step(turn.get("content") or "")
    rewards, about = game.close()
    metrics = {"turns": len(talks.get(role, ())) // 2, f"player_{role}": rewards[role]}
    metrics["invalid_move"] = float(about[role].get("invalid_move", False))
    return {"reward": float(rewards[role]), "metrics": metrics}


def _raw(settings):
    """The game without wrappers, which repeat the whole history in each observation."""
    return f"{settings['game'].removesuffix('-raw')}-raw"


def _shown(player, seen):
    """The new observations of a player: without its own moves, which its conversation has."""
    import textarena

    own = textarena.ObservationType.PLAYER_ACTION
    lines = [
        text if author < 0 else f"Player {author}: {text}"
        for author, text, kind in seen
        if (author, kind) != (player, own)
    ]
    return "\n".join(lines).strip()
