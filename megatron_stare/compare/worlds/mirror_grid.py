"""The quickstart's world on disk: a tiny Qwen2-shaped checkpoint, its character tokenizer, and
mirror-grid problems.

    model/                 config.json, generation_config.json, model.safetensors (fp32, random),
                           tokenizer files
    train.jsonl            RL prompts: every solvable pair but the held-out ones, EASY and HARD in
                           their natural mix
    heldout_easy.jsonl     256 EASY problems that neither SFT nor RL sees
    heldout_hard.jsonl     256 HARD ones
    cold_start.jsonl       SFT demonstrations {"prompt", "response"}, the wrong ones among them
    world.json             written last: the seed and the line counts; a directory without it is not
                           complete

The seed decides every byte of the .jsonl files and, for one torch version, of the weights.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from megatron_stare.compare.worlds.files import is_complete, write_world
from megatron_stare.scoring.mirror_grid import (
    END,
    MAX_MOVES,
    MOVES,
    SIDE,
    State,
    apply_move,
    approaching_moves,
    format_label,
    format_prompt,
    format_state,
    kind_of,
    legal_moves,
    solvable_pairs,
)

WORLD_VERSION = 1
PAD = "[pad]"
CHARACTERS = "0123456789" + MOVES + ">:" + END
MAX_POSITIONS = 64

HELDOUT_PER_KIND = 256
COLD_START_STEPS = 400
COLD_START_BATCH = 128

APPROACH_PROBABILITY = 0.8
CORRUPT_PROBABILITY = 0.03
STOP_EARLY_PROBABILITY = 0.03

# Results of a prototype of this task; printed with its numbers.
CAVEATS = (
    "How to read a problem: `34>87:` asks for a walk on a 10 by 10 grid from x = 3, y = 4 to "
    "x = 8, y = 7. An answer names each move and the cell that it leads to, as in `e44n45...`: "
    "e, w, n and s go one cell, r swaps x and y, f turns x into 9 - x.",
    "The task is built so that two rare moves (r and f) matter: no HARD problem can be solved "
    "without them. It shows a mechanism and is not a benchmark.",
    "HARD is in-distribution: held-out pairs of a kind that is present in training.",
    "The paper's fixed W=1.1, M=0.9 does nothing at this size: the weight needed grows as batches "
    "shrink. Here they only start the adaptive rule, with alpha 0.05 and W up to 2 (the paper's "
    "bound is 1.5: with it one of three seeds left the band); with alpha 0.01 a prototype lost "
    "one of three seeds.",
)

Pair = tuple[State, State]


def make_world(directory: Path, seed: int) -> None:
    """Write the world of `seed` into `directory`, unless it is complete there. A world of another
    seed or version is replaced. Call it from one process.
    """
    if is_complete(directory, WORLD_VERSION, seed):
        return
    rng = random.Random(seed)
    train, heldout_easy, heldout_hard = split_pairs(rng)
    rows = {
        "train.jsonl": [problem_row(pair) for pair in train],
        "heldout_easy.jsonl": [problem_row(pair) for pair in heldout_easy],
        "heldout_hard.jsonl": [problem_row(pair) for pair in heldout_hard],
        "cold_start.jsonl": [demonstration_row(pair, rng) for pair in _draw_pairs(train, rng)],
    }
    write_world(directory, WORLD_VERSION, seed, rows, character_tokenizer(), MAX_POSITIONS)


def split_pairs(rng: random.Random) -> tuple[list[Pair], list[Pair], list[Pair]]:
    """(train, held-out easy, held-out hard), shuffled and disjoint."""
    pairs = list(solvable_pairs())
    rng.shuffle(pairs)
    heldout_easy = [pair for pair in pairs if kind_of(*pair) == "easy"][:HELDOUT_PER_KIND]
    heldout_hard = [pair for pair in pairs if kind_of(*pair) == "hard"][:HELDOUT_PER_KIND]
    train = sorted({*pairs} - {*heldout_easy, *heldout_hard})
    rng.shuffle(train)  # again: of the first pairs of either kind, all were held out
    return train, heldout_easy, heldout_hard


def problem_row(pair: Pair) -> dict[str, Any]:
    """One row of train.jsonl or of a held-out file."""
    return {
        "prompt": format_prompt(*pair),
        "label": format_label(*pair),
        "metadata": {"kind": kind_of(*pair)},
    }


def demonstration_row(pair: Pair, rng: random.Random) -> dict[str, str]:
    """One row of cold_start.jsonl: a fallible walk, right or wrong."""
    return {"prompt": format_prompt(*pair), "response": demonstrate(*pair, rng)}


def demonstrate(start: State, target: State, rng: random.Random) -> str:
    """A walk by the fallible demonstrator, closed by a full stop.

    Each move is, 80%, a random one of those e, n, s, w that approach the target, else any legal
    move, r and f among them. 3% of the written states are replaced by another one, from which the
    walk continues. It ends at the target, after MAX_MOVES moves, or after any move by a 3% chance.
    """
    state, written = start, []
    for _ in range(MAX_MOVES):
        moves = (
            approaching_moves(state, target)
            if rng.random() < APPROACH_PROBABILITY
            else legal_moves(state)
        )
        move = rng.choice(moves)
        reached = apply_move(state, move)
        assert reached is not None, f"{move} from {state} is legal"
        state = _another_state(reached, rng) if rng.random() < CORRUPT_PROBABILITY else reached
        written.append(move + format_state(state))
        if state == target or rng.random() < STOP_EARLY_PROBABILITY:
            break
    return "".join(written) + END


def _another_state(state: State, rng: random.Random) -> State:
    """A uniformly drawn state other than `state`."""
    index = (SIDE * state[0] + state[1] + rng.randrange(1, SIDE * SIDE)) % (SIDE * SIDE)
    return divmod(index, SIDE)


def _draw_pairs(pairs: list[Pair], rng: random.Random) -> list[Pair]:
    """Draw the pairs of the cold start, each seen equally often up to one."""
    drawn: list[Pair] = []
    while len(drawn) < COLD_START_STEPS * COLD_START_BATCH:
        drawn += rng.sample(pairs, len(pairs))
    return drawn[: COLD_START_STEPS * COLD_START_BATCH]


def character_tokenizer() -> Any:
    """One id per character, [pad] = 0; the end token is the full stop. Foreign characters are
    dropped.

    The full stop is a special token: `decode(ids, skip_special_tokens=True)` drops it, and the
    verifier needs it. AutoTokenizer reads any tokenizer next to a Qwen2 config as byte-pair
    Qwen2Tokenizer (transformers 5), hence pairs without merges; and adds that class's unknown token
    to the vocabulary unless one is named, hence [pad] again.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {PAD: 0} | {character: index + 1 for index, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        unk_token=PAD,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
