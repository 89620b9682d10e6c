"""A tokenizer in tiktoken's files against a naive byte-pair encoder."""

from __future__ import annotations

import base64
import itertools
import json
from pathlib import Path

import pytest
import regex
from transformers import AutoTokenizer

from megatron_stare.__main__ import main
from megatron_stare.config import UserError
from megatron_stare.loop.resolve import load_tokenizer
from megatron_stare.policy.conversion.tiktoken import tiktoken_to_hf
from tests.paths import ROOT
from tests.tiny_models import tiny_config

PARTS = [
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Ll}\p{Lo}&&[^\p{Han}]]+(?i:'s|'t)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
]
TEXTS = [
    (ROOT / "docs/theory.md").read_text("utf-8")[:3000],
    "Find x: \\frac{1}{2} + 12345 = y's. \u4f60\u597dabc\u4e16\u754c \u00e9\u00e8 \U0001f600\n\n"
    "  def f(a):\n        return a",
]
CODE = f"""
raise SystemExit("this file is never run")
class TikTokenTokenizer:
    pat_str = "|".join({PARTS!r})
"""
TEMPLATE = "{% for m in messages %}<|im_user|>{{ m['content'] }}<|im_end|>{% endfor %}"


def split(text: str) -> list[bytes]:
    """`regex` writes the intersection of two sets with a flag of its own."""
    return [part.encode() for part in regex.findall("(?V1)" + "|".join(PARTS), text)]


def naive(ranks: dict[bytes, int], text: str) -> list[int]:
    """tiktoken's algorithm: join the neighbours whose union has the lowest rank."""
    ids = []
    for piece in split(text):
        parts = [bytes([byte]) for byte in piece]
        while len(parts) > 1:
            pairs = [ranks.get(a + b, len(ranks)) for a, b in itertools.pairwise(parts)]
            best = min(pairs)
            if best == len(ranks):
                break
            at = pairs.index(best)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [ranks[part] for part in parts]
    return ids


def trained(merges: int) -> dict[bytes, int]:
    """Ranks of the most frequent pairs, one after the other."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    words = [[bytes([b]) for b in piece] for text in TEXTS for piece in split(text)]
    for _ in range(merges):
        counts: dict[bytes, int] = {}
        for word in words:
            for a, b in itertools.pairwise(word):
                counts[a + b] = counts.get(a + b, 0) + 1
        new = max((pair for pair in counts if pair not in ranks), key=lambda pair: counts[pair])
        ranks[new] = len(ranks)
        for word in words:
            at = 0
            while at < len(word) - 1:
                if word[at] + word[at + 1] == new:
                    word[at : at + 2] = [new]
                at += 1
    return ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[bytes, int]]:
    place, ranks = tmp_path_factory.mktemp("moonlight"), trained(300)
    tiny_config("deepseek_v3", vocab_size=len(ranks) + 6).save_pretrained(place)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (place / "tiktoken.model").write_text("".join(lines))
    (place / "tokenization_moonshot.py").write_text(CODE)
    first = len(ranks)
    names = {first: "[BOS]", first + 1: "[EOS]", first + 2: "<|im_end|>", first + 4: "<|im_user|>"}
    added = {n: {"content": name, "special": name != "<|im_end|>"} for n, name in names.items()}
    config = {
        "added_tokens_decoder": added,
        "auto_map": {"AutoTokenizer": ["tokenization_moonshot.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": {"content": "[EOS]"},
        "chat_template": TEMPLATE,
        "tokenizer_class": "TikTokenTokenizer",
    }
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    return place, ranks


def test_ids_are_those_of_tiktoken(
    model: tuple[Path, dict[bytes, int]], capsys: pytest.CaptureFixture[str]
):
    place, ranks = model
    with pytest.raises(UserError, match=f"convert tiktoken-to-hf {place} {place}"):
        load_tokenizer(str(place))
    assert main(["convert", "tiktoken-to-hf", str(place), str(place)]) == 0
    assert f"a tokenizer of {len(ranks) + 6} tokens in {place}" in capsys.readouterr().out
    for tokenizer in (load_tokenizer(str(place)), AutoTokenizer.from_pretrained(place)):
        for text in TEXTS:
            ids = tokenizer.encode(text)
            assert ids == naive(ranks, text) and len(ids) < len(text.encode())
            assert tokenizer.decode(ids) == text
        assert (tokenizer.bos_token, tokenizer.eos_token) == ("[BOS]", "[EOS]")
        assert tokenizer.decode([len(ranks) + 3]) == f"<|reserved_token_{len(ranks) + 3}|>"
        ends = [len(ranks), len(ranks) + 2]
        assert tokenizer.decode(ends, skip_special_tokens=True) == "<|im_end|>"
        chat = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
        assert tokenizer.encode(chat) == [len(ranks) + 4, ord("a"), len(ranks) + 2]
    with pytest.raises(UserError, match=r"has a tokenizer\.json, which works"):
        tiktoken_to_hf(place, place)


def test_a_damaged_directory_names_the_file(model: tuple[Path, dict[bytes, int]], tmp_path: Path):
    place, _ = model
    files = ("tiktoken.model", "config.json", "tokenization_moonshot.py", "tokenizer_config.json")
    for number, file in enumerate(files):
        source = tmp_path / str(number)
        source.mkdir()
        for other in files:
            (source / other).write_bytes((place / other).read_bytes())
        for content in {
            "tiktoken.model": ("YQ== 7", "YQ=="),
            "tokenizer_config.json": ("x = 1", "{}"),
        }.get(file, ("x = 1", "x = (")):
            (source / file).write_text(content)
            with pytest.raises(UserError, match=file.replace("moonshot", r"(\*|moonshot)")):
                tiktoken_to_hf(source, tmp_path / "out")
            assert not (tmp_path / "out").exists()
