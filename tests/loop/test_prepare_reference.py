"""A served reference's log-probs come to the tokens that they belong to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest

from megatron_stare.loop import prepare
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Group, Prompt, Rollout
from tests.small_run import small_config


def rollout(ids: list[int], mask: list[int], lengths: tuple[int, ...] = ()) -> Rollout:
    own = [-9.0] * len(ids)
    return Rollout(ids, own, mask, status="completed", weight_version=0, lengths=lengths)  # type: ignore[arg-type]


def test_every_sequence_of_an_episode_is_read_on_its_own(
    tmp_path: Path, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int]] = []

    def read(urls: Any, settings: Any, size: int, sequences: Any) -> list[numpy.ndarray]:
        """The log-prob of an id is a tenth of it and of the number of ids before it."""
        asked.extend(ids.tolist() for ids in sequences)
        return [-ids[1:] / 10 - numpy.arange(1, len(ids)) for ids in sequences]

    monkeypatch.setattr(prepare, "read_logprobs", read)
    plain = Group(
        Prompt(0, numpy.array([7, 8], numpy.int32), label=""),
        (rollout([1, 2, 3], [1, 1, 1]), rollout([4, 5], [1, 0])),
    )
    episode = rollout([20, 21, 22, 30, 31], [0, 1, 1, 0, 1], lengths=(3, 2))
    agents = Group(Prompt(1, numpy.array([7], numpy.int32), label=""), (episode,))
    elsewhere = Group(Prompt(2, numpy.zeros(0, numpy.int32), label=""), (), holder=1)
    config, groups = small_config(tmp_path), [plain, agents, elsewhere]
    found = prepare.with_served_logprobs(groups, config, topology)
    assert asked == [[7, 8, 1, 2, 3], [7, 8, 4, 5], [20, 21, 22], [30, 31]]
    expected = [[-2.1, -3.2, -4.3], [-2.4, -3.5], [0, -3.1, -4.2, 0, -4.1]]
    rollouts = [one for group in found for one in group.rollouts]
    for one, values in zip(rollouts, expected, strict=True):
        numpy.testing.assert_allclose(one.logprobs, values, rtol=1e-6)  # type: ignore[attr-defined]
    assert [group.prompt for group in found] == [plain.prompt, agents.prompt, elsewhere.prompt]
    assert found[2].holder == 1 and episode.logprobs[0] == -9, "the rollouts keep their own"
