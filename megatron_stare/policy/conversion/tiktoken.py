"""A tokenizer in tiktoken's files becomes tokenizer.json; no code of the model's directory runs.

Moonlight and Kimi ship `tiktoken.model`, with a line "base64 rank" per token; the regular
expression that splits text, `pat_str`, in a Python file, which is only parsed; and the special
tokens in tokenizer_config.json. A token's rank is its id, and tiktoken first joins the two
neighbours whose union has the lowest rank. So every split of a token into two tokens is a merge,
in the order of ranks.
"""

from __future__ import annotations

import ast
import base64
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from megatron_stare.config import UserError

RANKS, FAST, CONFIG = "tiktoken.model", "tokenizer.json", "tokenizer_config.json"
_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")


def tiktoken_to_hf(source: Path, target: Path) -> int:
    """Write tokenizer.json and its config into `target`, which may be `source`. Number of tokens.

    UserError: a file is missing or damaged, or `target` has a tokenizer.json.
    """
    if (target / FAST).exists():
        raise UserError(f"TARGET {target} has a {FAST}, which works as it is; leave it")
    ranks, config = _ranks(source / RANKS), _json(source / CONFIG)
    size = _json(source / "config.json").get("vocab_size", len(ranks))
    tokenizer = _byte_pairs(ranks, _pattern(source))
    tokenizer.add_tokens(_added(config, len(ranks), size))
    kept = {name: _text(config[name]) for name in _NAMED if config.get(name)}
    kept |= {name: config[name] for name in ("chat_template", "model_max_length") if name in config}
    template = source / "chat_template.jinja"
    if template.is_file():
        kept["chat_template"] = template.read_text("utf-8")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **kept
    ).save_pretrained(target)
    return tokenizer.get_vocab_size()


def _ranks(file: Path) -> dict[bytes, int]:
    try:
        lines = [line.split() for line in file.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (OSError, ValueError) as error:
        raise UserError(f"SOURCE {file}: {error}; download the model's tokenizer again") from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise UserError(f"SOURCE {file}: ranks are missing or occur twice; download it again")
    return ranks


def _json(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text("utf-8")))
    except (OSError, ValueError) as error:
        raise UserError(f"SOURCE {file}: {error}; download the model's files again") from None


def _pattern(source: Path) -> str:
    """The value of `pat_str` in tokenization_*.py: a text, or texts joined by a text."""
    for file in sorted(source.glob("tokenization_*.py")):
        try:
            code = ast.parse(file.read_text("utf-8"))
        except SyntaxError as error:
            raise UserError(f"SOURCE {file}: {error}; download it again") from None
        for node in ast.walk(code):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("pat_str"):
                match node.value:
                    case ast.Constant(str(text)):
                        return text
                    case ast.Call(ast.Attribute(ast.Constant(str(text)), "join"), [parts]):
                        return text.join(ast.literal_eval(parts))
    raise UserError(
        f"SOURCE {source}: no tokenization_*.py there sets pat_str to a text; download the model's "
        "Python files too, which are read and not run"
    )


def _byte_pairs(ranks: dict[bytes, int], pattern: str) -> Tokenizer:
    letters = bytes_to_unicode()

    def written(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        parts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [part for part in parts if part[0] in ranks and part[1] in ranks]
        known.sort(key=lambda part: (ranks[part[0]], ranks[part[1]]))
        merges += [(written(left), written(right)) for left, right in known]
    vocabulary = {written(token): rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _added(config: dict[str, Any], first: int, size: int) -> list[AddedToken]:
    """The tokens with ids from `first` on; ids without a name get one, so that each has a text."""
    known = config.get("added_tokens_decoder")
    if not known:
        raise UserError(
            f"SOURCE: {CONFIG} has no added_tokens_decoder, so that no special token has a name; "
            "download the model's tokenizer again"
        )
    named = {int(number): token for number, token in known.items()}
    numbers = range(first, max(size, *(number + 1 for number in named)))
    tokens = [named.get(n, {"content": f"<|reserved_token_{n}|>"}) for n in numbers]
    return [
        AddedToken(_text(token), normalized=False, special=token.get("special", True))
        for token in tokens
    ]


def _text(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])
