"""The tool-use quickstart's world on disk: a tiny Qwen2-shaped checkpoint that can copy but not
multiply, and sums.

    model/              config.json, model.safetensors (fp32, random), a byte tokenizer with a chat
                        template
    train.jsonl         RL problems {"prompt": [messages], "label"}: a * b + c and the like, with
                        two-digit numbers
    heldout.jsonl       256 that neither SFT nor RL sees
    cold_start.jsonl    conversations {"messages": [...]} of a careless demonstrator
    world.json          written last

An answer without the calculator is a guess; a call needs a copy of the problem, and the answer a
copy of the result. The demonstrator calls it in 7 of 10 conversations, and there makes
mistakes: a wrong digit in the call, a call that is not closed, a result copied wrongly; it also
ends turns with neither call nor answer.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from megatron_stare.compare.worlds.files import is_complete, write_world
from megatron_stare.rollout.tools.builtin import evaluate, show

WORLD_VERSION = 1
END, PAD = "<|end|>", "[pad]"
ROLES = ("<user>", "<assistant>", "<tool>")
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
CALL_BEGIN, CALL_END = '{"name": "calculator", "arguments": {"expression": "', '"}}'
BOX_OPEN, BOX_CLOSE = "\\boxed{", "}"
# Written as one token each, so that a hundred thousand parameters need not learn to spell them.
WORDS = (*ROLES, CALL_OPEN, CALL_CLOSE, CALL_BEGIN, CALL_END, BOX_OPEN)
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}" + END + "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MAX_POSITIONS = 256
TRAIN, HELDOUT, DEMONSTRATIONS = 4096, 256, 25_600

CAVEATS = (
    "The task is built so that a tool is needed: the model cannot multiply, the calculator can. It "
    "shows that tool use is learnt, and is not a benchmark.",
    "Held-out problems are of the kind that is present in training.",
)


def make_calculator_world(directory: Path, seed: int) -> None:
    """Write the world of `seed` into `directory`, unless it is complete there. Call it from one
    process.
    """
    if is_complete(directory, WORLD_VERSION, seed):
        return
    rng = random.Random(seed)
    problems = draw_problems(rng, TRAIN + HELDOUT)
    rows = {
        "train.jsonl": [problem_row(problem) for problem in problems[HELDOUT:]],
        "heldout.jsonl": [problem_row(problem) for problem in problems[:HELDOUT]],
        "cold_start.jsonl": [
            {"messages": demonstrate(rng.choice(problems[HELDOUT:]), rng)}
            for _ in range(DEMONSTRATIONS)
        ],
    }
    write_world(directory, WORLD_VERSION, seed, rows, tool_tokenizer(), MAX_POSITIONS)


def draw_problems(rng: random.Random, count: int) -> list[str]:
    """Different expressions of 7 characters, such as 37*4+12."""
    found: dict[str, None] = {}
    while len(found) < count:
        first, second, third = rng.randrange(10, 100), rng.randrange(2, 10), rng.randrange(10, 100)
        found[f"{first}{rng.choice('*+-')}{second}{rng.choice('+-')}{third}"] = None
    return list(found)


def problem_row(problem: str) -> dict[str, Any]:
    """One row of train.jsonl or heldout.jsonl."""
    return {
        "prompt": [{"role": "user", "content": f"{problem}="}],
        "label": show(evaluate(problem)),
    }


def demonstrate(problem: str, rng: random.Random) -> list[dict[str, str]]:
    """A conversation: the careless demonstrator's, right about half of the time."""
    asked = {"role": "user", "content": f"{problem}="}
    if rng.random() < 0.3:
        guess = str(rng.randrange(-90, 1000))
        return [asked, _said(guess if rng.random() < 0.3 else _boxed(guess))]
    expression = _with_wrong_digit(problem, rng) if rng.random() < 0.1 else problem
    if rng.random() < 0.05:
        return [asked, _said(CALL_OPEN + CALL_BEGIN + expression + CALL_CLOSE)]
    result = show(evaluate(expression))
    answer = _with_wrong_digit(result, rng) if rng.random() < 0.1 else result
    call = _said(CALL_OPEN + CALL_BEGIN + expression + CALL_END + CALL_CLOSE)
    return [asked, call, {"role": "tool", "content": result}, _said(_boxed(answer))]


def _said(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def _boxed(answer: str) -> str:
    return BOX_OPEN + answer + BOX_CLOSE


def _with_wrong_digit(text: str, rng: random.Random) -> str:
    place = rng.choice([number for number, character in enumerate(text) if character.isdigit()])
    other = rng.choice([digit for digit in "123456789" if digit != text[place]])
    return text[:place] + other + text[place + 1 :]


def tool_tokenizer() -> Any:
    """One id per byte, so that nothing is ever unknown, and one for each of WORDS and END."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {PAD: 0} | {character: index + 1 for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        unk_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
