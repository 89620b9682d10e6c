"""The mirror-grid walk: the quickstart's task, with its rules and its verifier.

A state is two digits xy on a 10 x 10 grid that does not wrap. Six moves:

    e, w    x + 1, x - 1        n, s    y + 1, y - 1        (off the grid: illegal)
    r       swap, (x, y) -> (y, x)                          f    flip, x -> 9 - x

The prompt `34>87:` asks for a walk from 34 to 87; the response writes each move and the state it
leads to, then a full
stop: `e44e54n55...n87.`, one to eight moves. All ordered pairs whose shortest walk has at most
eight moves are problems. EASY ones are at Manhattan distance <= 8; HARD ones are further apart, so
that no walk without r or f fits.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal

SIDE = 10
MOVES = "enswrf"
MAX_MOVES = 8
END = "."

State = tuple[int, int]
Kind = Literal["easy", "hard"]

_RESPONSE = re.compile(rf"(?:[{MOVES}][0-9][0-9]){{1,{MAX_MOVES}}}\{END}")
_LABEL = re.compile(r"([0-9])([0-9])>([0-9])([0-9])")


def apply_move(state: State, move: str) -> State | None:
    """The state after `move`, or None where the move would leave the grid.
    Unknown moves raise ValueError.
    """
    x, y = state
    if move == "r":
        return y, x
    if move == "f":
        return SIDE - 1 - x, y
    if move not in MOVES or len(move) != 1:
        raise ValueError(f"mirror grid: unknown move {move!r}; the moves are {', '.join(MOVES)}")
    if move in "ew":
        x += 1 if move == "e" else -1
    else:
        y += 1 if move == "n" else -1
    return (x, y) if 0 <= x < SIDE and 0 <= y < SIDE else None


def legal_moves(state: State) -> list[str]:
    """The moves that stay on the grid, in the order of MOVES. r and f always do."""
    return [move for move in MOVES if apply_move(state, move) is not None]


def manhattan_distance(start: State, target: State) -> int:
    """|dx| + |dy|: the shortest walk by e, n, s and w alone."""
    return abs(start[0] - target[0]) + abs(start[1] - target[1])


def approaching_moves(state: State, target: State) -> list[str]:
    """The moves among e, n, s, w that bring `state` one step closer to `target`;
    empty at the target.
    """
    (x, y), (target_x, target_y) = state, target
    moves = []
    if target_x != x:
        moves.append("e" if target_x > x else "w")
    if target_y != y:
        moves.append("n" if target_y > y else "s")
    return moves


@cache
def distances_from(start: State) -> dict[State, int]:
    """Shortest walks with all six moves from `start` to every state, by breadth-first search."""
    distance = {start: 0}
    frontier = deque([start])
    while frontier:
        state = frontier.popleft()
        for move in legal_moves(state):
            reached = apply_move(state, move)
            if reached is not None and reached not in distance:
                distance[reached] = distance[state] + 1
                frontier.append(reached)
    return distance


def kind_of(start: State, target: State) -> Kind:
    """EASY where e, n, s and w alone can reach the target within MAX_MOVES, else HARD."""
    return "easy" if manhattan_distance(start, target) <= MAX_MOVES else "hard"


def solvable_pairs() -> Iterator[tuple[State, State]]:
    """All ordered pairs start != target at full-move distance <= MAX_MOVES,
    in lexicographic order.
    """
    states = [(x, y) for x in range(SIDE) for y in range(SIDE)]
    for start in states:
        distance = distances_from(start)
        for target in states:
            if start != target and distance[target] <= MAX_MOVES:
                yield start, target


def format_state(state: State) -> str:
    """(3, 4) -> '34'."""
    return f"{state[0]}{state[1]}"


def format_label(start: State, target: State) -> str:
    """((3, 4), (8, 7)) -> '34>87'."""
    return f"{format_state(start)}>{format_state(target)}"


def format_prompt(start: State, target: State) -> str:
    """((3, 4), (8, 7)) -> '34>87:'."""
    return format_label(start, target) + ":"


def parse_label(label: str) -> tuple[State, State]:
    """'34>87' -> ((3, 4), (8, 7)). Anything else raises ValueError."""
    match = _LABEL.fullmatch(label)
    if match is None:
        raise ValueError(f"mirror grid: label {label!r} is not of the form '34>87'")
    start_x, start_y, target_x, target_y = map(int, match.groups())
    return (start_x, start_y), (target_x, target_y)


def mirror_grid_reward(response: str, label: str, metadata: dict[str, Any]) -> float:
    """1.0 for a complete and true walk from the label's start to its target, else 0.0.

    Right means: one to eight moves and a closing full stop, nothing else; every move legal; every
    written state the one its move leads to; the last state the target. A truncated response lacks
    the full stop and scores 0.0, so `response` must be decoded with the end token kept. `metadata`
    is not used. A malformed label raises ValueError.
    """
    state, target = parse_label(label)
    if _RESPONSE.fullmatch(response) is None:
        return 0.0
    for at in range(0, len(response) - 1, 3):
        reached = apply_move(state, response[at])
        if reached is None or format_state(reached) != response[at + 1 : at + 3]:
            return 0.0
        state = reached
    return 1.0 if state == target else 0.0
