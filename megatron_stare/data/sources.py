"""Sources of rows: .jsonl, .json, .parquet and .arrow files, directories of them,
data sets of reasoning-gym, or a function of the user's.

A source is one string: a path, several separated by commas, or a dotted path
package.module.function that takes nothing and returns an iterable of rows. A directory is a Hugging
Face dataset (as save_to_disk writes it), or holds shards.

`reasoning_gym:NAME?key=value&key=value` is one of about a hundred procedural data sets: `size` and
`seed`, and its own settings, e.g. reasoning_gym:chain_sum?size=500&seed=1&max_terms=3. The reward
`reasoning_gym` (scoring/gym_verifier.py) gives a row to the scorer of its data set.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron_stare.config import UserError, callable_at, from_hub, nearest

PREFIX = "reasoning_gym:"
SIZE, SEED = 1000, 0  # of a data set of reasoning-gym whose source names none
SUFFIXES = (".parquet", ".jsonl", ".json", ".arrow")
_BATCH = 1024  # rows of a table turned into objects together
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_FUNCTION = "a function without arguments that returns rows"
Function = Callable[[], Iterable[Any]]
_SEPARATOR = re.compile(r",(?![^\[]*\])")  # not inside of operators=["+","-"]
_SHARD = re.compile(r"(?P<split>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")


class RawRow(NamedTuple):
    """`row` is the decoded object, or `fault` says why there is none.
    `number` is its place in `file`, from 1.
    """

    file: str
    number: int
    row: Any
    fault: str = ""


def raw_rows(source: str, setting: str = "data source") -> Iterator[RawRow]:
    """Every row of a source, which `setting` names, in order. UserError:
    a part of it is missing, damaged or of no known kind.
    """
    for part, found in parts(source, setting):
        if callable(found):
            yield from _from_function(part, found)
            continue
        for file in found:
            yield from _READERS[file.suffix](file)


def parts(source: str, setting: str) -> list[tuple[str, Function | list[Path]]]:
    """The parts of a source by name: their files, or the user's function. UserError as of raw_rows,
    naming the setting.
    """
    found: list[tuple[str, Function | list[Path]]] = []
    for part in _parts(source):
        path = Path(part)
        if part.startswith(PREFIX):
            gym_rows(part)  # refuses what cannot be used
            found.append((part, functools.partial(gym_rows, part)))
        elif not path.exists() and path.suffix not in SUFFIXES and _DOTTED.fullmatch(part):
            found.append((part, callable_at(part, setting, _FUNCTION)))
        else:
            found.append((part, _files(path, setting)))
    return found


def _parts(source: str) -> list[str]:
    if Path(source).exists():
        return [source]
    separated = _SEPARATOR.split(source)
    return [part.strip() for part in separated if part.strip()] or [source]


def _files(path: Path, setting: str) -> list[Path]:
    if not path.exists():
        remedy = from_hub(str(path), data=True) or f"; give {', '.join(SUFFIXES)}, or a directory"
        raise UserError(f"{setting}={path} does not exist{remedy}")
    if path.is_dir():
        return _directory(path)
    if path.suffix not in SUFFIXES:
        raise UserError(
            f"{setting}={path} has suffix {path.suffix!r}; give {', '.join(SUFFIXES)}, or a "
            "directory"
        )
    return [path]


def _directory(path: Path) -> list[Path]:
    """The files of a dataset directory, in the order of its rows."""
    if (path / "dataset_dict.json").is_file():
        splits = _described(path / "dataset_dict.json").get("splits") or []
        if len(splits) != 1:
            raise UserError(
                f"{path} holds the splits {', '.join(splits)}; name one, e.g. {path / 'train'}"
            )
        return _directory(path / splits[0])
    if (path / "state.json").is_file():
        state = _described(path / "state.json")
        if state.get("_indices_data_files"):
            raise UserError(
                f"{path} holds a selection of rows by index; save it again with flatten_indices()"
            )
        names = [entry.get("filename", "") for entry in state.get("_data_files") or []]
        missing = [name for name in names if not (path / name).is_file()]
        if missing or not names:
            raise UserError(
                f"{path}: state.json names {', '.join(missing) or 'no file'}; copy the whole "
                "directory"
            )
        return [path / name for name in names]
    return _shards(path)


def _described(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read ({str(error).splitlines()[0]}); copy the directory again"
        ) from None
    return found if isinstance(found, dict) else {}


def _shards(path: Path) -> list[Path]:
    """All files of one kind, here or in data/; every shard of one split."""
    for folder in (path, path / "data"):
        for suffix in (".parquet", ".arrow", ".jsonl"):
            files = sorted(folder.glob(f"*{suffix}"))
            if files:
                _check_shards(path, files)
                return files
    raise UserError(
        f"{path} holds no .parquet, .arrow or .jsonl file; give a directory of shards, or a file"
    )


def _check_shards(path: Path, files: list[Path]) -> None:
    """UserError where names like train-00000-of-00003 belong to several splits, or a shard is
    missing.
    """
    shards = [match for file in files if (match := _SHARD.fullmatch(file.stem))]
    splits = sorted({match["split"] for match in shards})
    if len(splits) > 1:
        raise UserError(
            f"{path} holds the splits {', '.join(splits)}; give the files of one, separated by "
            "commas"
        )
    if shards and len(shards) != int(shards[0]["count"]):
        raise UserError(
            f"{path} holds {len(shards)} of {int(shards[0]['count'])} shards; copy the others too"
        )


def _from_function(dotted: str, function: Function) -> Iterator[RawRow]:
    number = 0
    try:
        for number, row in enumerate(function(), start=1):
            yield RawRow(dotted, number, row)
    except Exception as error:  # a function of the user's may raise anything
        raise UserError(
            f"data source {dotted} failed after row {number} ({type(error).__name__}: {error}); "
            f"name {_FUNCTION}"
        ) from error


def _lines(path: Path) -> Iterator[RawRow]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield RawRow(str(path), number, *_decoded(line))


def _decoded(line: bytes) -> tuple[Any, str]:
    try:
        return json.loads(line.decode("utf-8-sig")), ""  # Windows begins files with a mark
    except UnicodeDecodeError as error:
        return None, f"is not UTF-8 (byte {error.start})"
    except (ValueError, RecursionError):
        return None, "is not a JSON object"


def _json(path: Path) -> Iterator[RawRow]:
    """One array of objects, or a .jsonl under another name."""
    with path.open("rb") as file:
        is_array = file.read(64).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    if not is_array:
        yield from _lines(path)
        return
    rows, fault = _decoded(path.read_bytes())
    if fault:
        raise UserError(
            f"{path} begins with '[' but is not a JSON array; write it again, or as .jsonl"
        )
    for number, row in enumerate(rows, start=1):
        yield RawRow(str(path), number, row)


def _parquet(path: Path) -> Iterator[RawRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield from _batches(path, file.iter_batches(_BATCH))
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{path} is not a readable parquet file ({str(error).splitlines()[0]}); write it again"
        ) from None


def _arrow(path: Path) -> Iterator[RawRow]:
    """The stream format (what the datasets library writes) or the file format."""
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as file:
            is_file = file.read(6) == b"ARROW1"
            file.seek(0)
            if is_file:
                reader = pyarrow.ipc.open_file(file)
                batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
            else:
                batches = iter(pyarrow.ipc.open_stream(file))
            yield from _batches(path, batches)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{path} is not a readable arrow file ({str(error).splitlines()[0]}); write it again"
        ) from None


def _batches(path: Path, batches: Iterator[Any]) -> Iterator[RawRow]:
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, _BATCH):
            for row in batch.slice(start, _BATCH).to_pylist():
                number += 1
                yield RawRow(str(path), number, row)


_READERS = {".parquet": _parquet, ".arrow": _arrow, ".jsonl": _lines, ".json": _json}


def gym_rows(source: str) -> Iterator[dict[str, Any]]:
    """Every row of a source. UserError: the package is missing, there is no such data set or
    setting, or the data set's scorer does not accept its own answer.
    """
    name, _, written = source.removeprefix(PREFIX).partition("?")
    dataset, first = _dataset(source, name, _settings(source, written))
    _check_scorer(source, name, first)
    return (_row(name, _as_in_a_file(entry)) for entry in dataset)


def _as_in_a_file(entry: dict[str, Any]) -> dict[str, Any]:
    """Without tuples and other types that JSON lacks."""
    return json.loads(json.dumps(entry, default=str))


def _row(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": entry["question"]}],
        "label": str(entry["answer"]),
        "metadata": {"reasoning_gym": name, "entry": entry},
        "data_source": f"{PREFIX}{name}",
    }


def _settings(source: str, written: str) -> dict[str, Any]:
    found: dict[str, Any] = {"size": SIZE, "seed": SEED}
    for pair in filter(None, written.split("&")):
        key, equals, value = pair.partition("=")
        if not equals:
            raise UserError(f"{source}: {pair!r} is not key=value; write NAME?size=500&seed=1")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def _dataset(source: str, name: str, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The data set and its first entry."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise UserError(
            f"{source} needs the package reasoning-gym: pip install reasoning-gym==0.1.25"
        ) from None
    if name not in DATASETS:
        raise UserError(
            f"{source}: {name!r} is not a data set of reasoning-gym{nearest(name, DATASETS)}"
        )
    try:
        dataset = reasoning_gym.create_dataset(name, **settings)
        return dataset, _as_in_a_file(dataset[0])
    except Exception as error:  # settings of the user's may make it raise anything
        raise UserError(f"{source}: reasoning-gym refuses these settings: {error}") from None


def _check_scorer(source: str, name: str, entry: dict[str, Any]) -> None:
    import reasoning_gym

    score = reasoning_gym.get_score_answer_fn(name)(entry["answer"], entry)
    if score < 1:
        raise UserError(
            f"{source}: the scorer of {name} gives the data set's own answer {score:g} instead of "
            "1, so that no response could be right; choose another data set"
        )
