"""512 sessions of ten calls at the same time, half of which lose connections."""

from __future__ import annotations

from megatron_stare.compare.worlds.calculator import tool_tokenizer
from megatron_stare.rollout.agents import endpoint
from tests.rollout.agents.crowd import Crowd

SESSIONS, TURNS = 512, 10


def test_512_sessions_at_a_time_get_every_answer_once_and_leave_nothing(monkeypatch):
    monkeypatch.setattr(endpoint, "MOST_KEYS", SESSIONS)
    crowd = Crowd(tool_tokenizer(), SESSIONS, TURNS)
    try:
        crowd.play(drops=False, turns=1)  # what a process opens once is open
        before = crowd.held()
        assert before["sessions"] == before["episodes"] == before["objects"] == 0
        assert before["places"] == SESSIONS
        crowd.inner.log.clear()
        crowd.inner.answered.clear()
        crowd.inner.hold(SESSIONS)
        rollouts = crowd.play(drops=True)
        sampled = sum(len(given) for _, given in crowd.inner.log)
        for number, rollout in enumerate(rollouts):
            assert rollout.outcome == 1.0, "no call was refused"
            assert rollout.episode["calls"] == TURNS and len(rollout.lengths) == 1
            assert rollout.episode.get("replayed", 0) <= (TURNS // 2 if number % 2 else 0)
        assert sum(rollout.loss_tokens for rollout in rollouts) == sampled
        assert len(crowd.inner.log) == SESSIONS * TURNS, "a call that was lost is sampled once"
        assert 0 < crowd.engine.endpoint.counts["lost_connections"] <= SESSIONS * TURNS // 4
        # All sessions' first calls waited in the engine before it gave an answer.
        assert len(set(crowd.inner.answered[:SESSIONS])) == SESSIONS
        assert crowd.held_at_last(before) == before
        assert len(crowd.engine.endpoint._over) == SESSIONS, "old keys are forgotten"
    finally:
        crowd.engine.close()
