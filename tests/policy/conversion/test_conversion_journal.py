"""The journal of a conversion's finished files, after kills and with damaged files."""

from __future__ import annotations

from pathlib import Path

from megatron_stare.policy.manifest import ConversionJournal
from megatron_stare.system import file_digest


def finished(directory: Path, journal: ConversionJournal, name: str) -> None:
    (directory / name).write_text(name)
    journal.add(name, file_digest(directory / name), items=[name])


def test_an_entry_after_a_torn_line_is_read(tmp_path: Path) -> None:
    first = ConversionJournal(tmp_path)
    finished(tmp_path, first, "a")
    (path,) = tmp_path.glob("*.jsonl")
    with path.open("a") as journal:
        journal.write('{"file": "b", "sha')  # killed here
    second = ConversionJournal(tmp_path)
    assert list(second.done) == ["a"]
    finished(tmp_path, second, "b")
    third = ConversionJournal(tmp_path)
    assert third.done == second.done
    assert third.done["b"]["items"] == ["b"]
    assert third.close() == {name: file_digest(tmp_path / name) for name in "ab"}
    assert not path.exists()


def test_a_file_that_changed_is_not_finished(tmp_path: Path) -> None:
    journal = ConversionJournal(tmp_path)
    for name in "abc":
        finished(tmp_path, journal, name)
    (tmp_path / "a").write_text("changed")
    (tmp_path / "b").unlink()
    assert list(ConversionJournal(tmp_path).done) == ["c"]
