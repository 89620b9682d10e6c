"""Seeds as numbers: which a server is sent, and that no two samples of a group share one.
Futures that an engine waits for. Tokens that end a response.
"""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from pathlib import Path

import pytest
from transformers import Qwen2Config

from megatron_stare.collect.sampling_settings import EVALUATION, TRAINING
from megatron_stare.config import EngineError
from megatron_stare.rollout.engine import seed_number, still_open, stop_ids
from tests.tiny_models import byte_tokenizer


def test_no_two_samples_share_a_seed():
    """Seeds of a group differ for certain, in the lower half of the number too; others differ by
    chance.
    """
    groups = itertools.product((0, 1, 2**40), (TRAINING, EVALUATION), range(40))
    numbers = [[seed_number((*words, sample)) for sample in range(64)] for words in groups]
    flat = [number for group in numbers for number in group]
    assert len(set(flat)) == len(flat) == 3 * 2 * 40 * 64
    assert all(0 <= number < 2**63 for number in flat)
    for group in numbers:
        assert len({number % 2**32 for number in group}) == 64
    far = [seed_number((1, 0, 7, sample)) for sample in (0, 1, 2**31, 2**32 - 1)]
    assert len({number % 2**32 for number in far}) == 4


def test_seeds_depend_on_every_word():
    assert seed_number((1, 23, 4)) != seed_number((12, 3, 4))
    assert seed_number((0, 1, 4)) != seed_number((1, 0, 4))
    assert seed_number((-1, 4)) != seed_number((255, 4))


def test_seeds_never_change_between_versions():
    """A run that is continued by a later version must not draw other numbers."""
    assert seed_number((0, 0, 0, 0)) == 6229990121472182273


class FailsAfterALook(Future[None]):
    """Fails as soon as a look has found it open."""

    def done(self) -> bool:
        is_done = super().done()
        if not is_done:
            self.set_exception(EngineError("lost"))
        return is_done


def test_a_failure_between_two_looks_is_raised_by_the_next_wait():
    """It would be raised later on one rank alone, while the others wait in a collective."""
    future = FailsAfterALook()
    assert still_open([future]) == [future]
    with pytest.raises(EngineError, match="lost"):
        still_open([future])


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITHOUT_END = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (CHATML, ["<|im_end|>"]),
        (WITHOUT_END, []),
        ("{{ raise_exception('no turns') }}", []),
        ("{% for m in messages %}{{ m['role'] }}<|im_end|>{% endfor %}", []),
        (None, []),
    ],
)
def test_the_chat_templates_end_of_a_turn_ends_a_response(
    tmp_path: Path, template: str | None, ends: list[str]
):
    """Qwen's base models name <|endoftext|> as their end, and their template ends turns with
    another token, which a cold start teaches them.
    """
    Qwen2Config(eos_token_id=0).save_pretrained(tmp_path)
    tokenizer = byte_tokenizer()  # its end token is 0
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = template
    expected = {0, *tokenizer.convert_tokens_to_ids(ends)}
    assert stop_ids(str(tmp_path), tokenizer) == expected
