"""The mirror-grid rules against naive twins:
matrix reachability, exhaustive walks, a verifier by simulation.
"""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stare.scoring import mirror_grid as grid

STATES = [(x, y) for x in range(10) for y in range(10)]
NAIVE_MOVES = {
    "e": lambda x, y: (x + 1, y),
    "w": lambda x, y: (x - 1, y),
    "n": lambda x, y: (x, y + 1),
    "s": lambda x, y: (x, y - 1),
    "r": lambda x, y: (y, x),
    "f": lambda x, y: (9 - x, y),
}


def naive_reward(response: str, label: str) -> float:
    """Replays the response triple by triple over strings, with the moves written as functions."""
    start, target = label.split(">")
    body, end = response[:-1], response[-1:]
    if end != "." or len(body) % 3 or not 3 <= len(body) <= 24:
        return 0.0
    here = start
    for triple in (body[at : at + 3] for at in range(0, len(body), 3)):
        if triple[0] not in NAIVE_MOVES:
            return 0.0
        x, y = NAIVE_MOVES[triple[0]](int(here[0]), int(here[1]))
        if not (0 <= x <= 9 and 0 <= y <= 9) or f"{x}{y}" != triple[1:]:
            return 0.0
        here = triple[1:]
    return float(here == target)


def honest_walk(start: grid.State, rng: random.Random, moves: int) -> tuple[str, grid.State]:
    written, here = "", start
    for _ in range(moves):
        move = rng.choice(grid.legal_moves(here))
        here = NAIVE_MOVES[move](*here)
        written += f"{move}{here[0]}{here[1]}"
    return written + ".", here


def test_moves_equal_the_twin_on_every_state():
    for state, (move, naive) in itertools.product(STATES, NAIVE_MOVES.items()):
        x, y = naive(*state)
        expected = (x, y) if 0 <= x <= 9 and 0 <= y <= 9 else None
        assert grid.apply_move(state, move) == expected
    assert set(grid.MOVES) == set(NAIVE_MOVES)


@pytest.mark.parametrize("move", ["", "x", "ew", "E"])
def test_unknown_moves_raise(move):
    with pytest.raises(ValueError, match="unknown move"):
        grid.apply_move((3, 4), move)


def test_distances_agree_with_relaxation_to_a_fixed_point():
    """Bellman-Ford over all pairs: distance(a, c) <= 1 + distance(b, c) for every move a -> b."""
    edges = [
        (a, naive(*a)) for a in STATES for naive in NAIVE_MOVES.values() if naive(*a) in set(STATES)
    ]
    for target in random.Random(0).sample(STATES, 12):
        distance = {state: 0 if state == target else 10**6 for state in STATES}
        changed = True
        while changed:
            changed = False
            for a, b in edges:
                if distance[b] + 1 < distance[a]:
                    distance[a], changed = distance[b] + 1, True
        assert all(grid.distances_from(state)[target] == distance[state] for state in STATES)


def test_counts_are_those_of_the_reference():
    pairs = list(grid.solvable_pairs())
    kinds = [grid.kind_of(*pair) for pair in pairs]
    assert (kinds.count("easy"), kinds.count("hard")) == (7080, 2756)
    assert len(set(pairs)) == len(pairs) and all(start != target for start, target in pairs)


def test_easy_and_hard_follow_from_reachability():
    """EASY: reachable in eight moves without r and f;
    HARD: not, but with them. By sets of reachable states.
    """
    for start in random.Random(1).sample(STATES, 10):
        reach = {"ewns": {start}, "ewnsrf": {start}}
        for _ in range(8):
            for moves, states in reach.items():
                reached = {NAIVE_MOVES[move](*state) for move in moves for state in states}
                reach[moves] = states | (reached & set(STATES))
        expected = {(start, state) for state in reach["ewnsrf"] - {start}}
        mine = {pair for pair in grid.solvable_pairs() if pair[0] == start}
        assert mine == expected
        assert {target for _, target in mine if grid.kind_of(start, target) == "easy"} == reach[
            "ewns"
        ] - {start}


def test_approaching_moves_are_exactly_those_that_lower_the_manhattan_distance():
    for start, target in itertools.product(STATES, random.Random(2).sample(STATES, 15)):
        here = abs(start[0] - target[0]) + abs(start[1] - target[1])
        closer = [
            move
            for move in "ewns"
            if (reached := grid.apply_move(start, move))
            and grid.manhattan_distance(reached, target) < here
        ]
        assert sorted(grid.approaching_moves(start, target)) == sorted(closer)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 9), st.sampled_from(STATES))
def test_honest_walks_are_right_up_to_eight_moves(seed, moves, start):
    response, end = honest_walk(start, random.Random(seed), moves)
    label = grid.format_label(start, end)
    assert (
        grid.mirror_grid_reward(response, label, {})
        == float(moves <= 8)
        == naive_reward(response, label)
    )


@settings(max_examples=500, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 8),
    st.integers(0, 30),
    st.sampled_from("0123456789enswrf>:. x"),
)
def test_one_changed_character_is_judged_as_by_the_twin(seed, moves, at, character):
    rng = random.Random(seed)
    start = rng.choice(STATES)
    response, end = honest_walk(start, rng, moves)
    changed = response[:at] + character + response[at + 1 :]
    label = grid.format_label(start, end)
    assert grid.mirror_grid_reward(changed, label, {}) == naive_reward(changed, label)


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        ("e44.", "34>44", 1.0),
        ("e44", "34>44", 0.0),  # truncated
        (".", "34>34", 0.0),  # no move
        ("", "34>44", 0.0),
        ("e44..", "34>44", 0.0),
        ("e44.\n", "34>44", 0.0),
        (" e44.", "34>44", 0.0),
        ("e45.", "34>45", 0.0),  # an untrue state
        ("w94.", "04>94", 0.0),  # no wrap-around
        ("e44e54.", "34>44", 0.0),  # continues past the target
        ("e44w34.", "34>34", 1.0),
        ("r43.", "34>43", 1.0),
        ("f64.", "34>64", 1.0),
        ("r33.", "33>33", 1.0),
        ("e\u0664\u0664.", "34>44", 0.0),  # digits of another script
    ],
)
def test_chosen_responses(response, label, reward):
    assert grid.mirror_grid_reward(response, label, {"kind": "easy"}) == reward


@pytest.mark.parametrize("label", ["", "34", "34>8", "34>87:", "ab>cd", "34>87\n"])
def test_a_malformed_label_raises(label):
    with pytest.raises(ValueError, match="not of the form"):
        grid.mirror_grid_reward("e44.", label, {})


def test_labels_and_prompts_are_read_back():
    for pair in random.Random(3).sample(list(grid.solvable_pairs()), 100):
        assert grid.parse_label(grid.format_label(*pair)) == pair
        assert grid.format_prompt(*pair) == grid.format_label(*pair) + ":"
