"""report.html: where it is written, and what is refused."""

from __future__ import annotations

import pytest

from benchmarks._synthetic_run import write_run
from megatron_stare.config import UserError
from megatron_stare.reporting.logbook import Logbook
from megatron_stare.reporting.report import keep_report, write_report


def test_the_page_of_one_run_is_in_its_directory_and_of_several_where_asked(tmp_path):
    one, other = write_run(tmp_path / "one", 3), write_run(tmp_path / "other", 3, loss="grpo_ds")
    assert write_report([one]) == one / "report.html"
    page = write_report([one, other], tmp_path / "deep" / "both.html")
    assert "GRPO-ds" in page.read_text(encoding="utf-8")
    assert sorted(path.name for path in page.parent.iterdir()) == ["both.html"]
    with pytest.raises(UserError, match="--output"):
        write_report([one, other])
    with pytest.raises(UserError, match="--output"):
        write_report([one], one)


def test_a_run_with_few_files_has_a_report(tmp_path):
    with Logbook(tmp_path) as book:
        book.write(1, {"entropy": 0.3})
    with pytest.raises(UserError, match=r"config\.yaml"):
        write_report([tmp_path])
    (tmp_path / "config.yaml").write_text(
        "loss:\n  name: grpo\n  target_entropy: 0.3\nrun:\n  seed: 3\n"
    )
    page = write_report([tmp_path]).read_text(encoding="utf-8")
    assert "Seed 3" in page and "Target entropy" not in page and "pass@" not in page


def test_an_empty_directory_is_refused_with_the_missing_file(tmp_path):
    with pytest.raises(UserError, match=r"neither metrics\.jsonl"):
        write_report([tmp_path])
    (tmp_path / "summary.json").write_text('{"seed": 0}')
    with pytest.raises(UserError, match="target_entropy"):
        write_report([tmp_path])


def test_a_finished_run_whose_page_cannot_be_written_is_no_error(tmp_path, capsys):
    run = write_run(tmp_path / "run", 3)
    torn = run / "diagnostics" / "step_00000002.json.gz"
    torn.parent.mkdir(exist_ok=True)
    torn.write_bytes(b"torn")
    keep_report(run)
    said = capsys.readouterr().err
    assert "step_00000002.json.gz: torn" in said and f"`report {run}` writes the page" in said
    torn.unlink()
    keep_report(run)
    assert (run / "report.html").is_file() and not capsys.readouterr().err
