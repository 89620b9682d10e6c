"""A whole page: of a comparison, of one run, of little, of nothing."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from megatron_stare.config import UserError
from megatron_stare.reporting import intervals
from megatron_stare.reporting.logbook import Logbook
from megatron_stare.reporting.report import write_report
from megatron_stare.reporting.summary import summarize_run


def make_run(directory: Path, arm: str, seed: int) -> dict:
    rng = random.Random(f"{arm}{seed}")
    with Logbook(directory) as book:
        for step in range(1, 21):
            row = {
                "entropy": rng.uniform(0.2, 0.4),
                "reward": rng.random(),
                "response_length": 18.0,
                "gate": step % 2,
            }
            row |= (
                {"weight_w": 1.2, "weight_m": 0.8}
                if arm == "stare"
                else {"weight_w": 1.0, "weight_m": 1.0}
            )
            if step % 10 == 0:
                for name in ("heldout_hard", "heldout_easy"):
                    row |= {
                        f"eval/{name}/avg_at_k": 0.5,
                        f"eval/{name}/pass_at_k": 0.75,
                        f"eval/{name}/k": 8,
                    }
            book.write(step, row)
    return summarize_run(directory, 0.3)


def inlined_pngs(page: str) -> int:
    return len(re.findall(r'src="data:image/png;base64,iVBOR', page))


def test_report_of_a_comparison(tmp_path):
    seeds = {
        str(seed): {
            arm: make_run(tmp_path / f"seed{seed}" / arm, arm, seed) for arm in ("grpo_ds", "stare")
        }
        for seed in (0, 1)
    }
    summary = {
        "target_entropy": 0.3,
        "seed": 0,
        "runs": intervals.mean_runs(seeds),
        "seeds": seeds,
    }
    summary |= {"command": "make demo <here>", "caveats": ["it is a toy & says so"]}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert inlined_pngs(page) == 5 == len(list((tmp_path / "plots").glob("*.png")))
    assert not re.search(r'(src|href)="(?!data:)', page), "self-contained"
    for expected in (
        "GRPO-ds",
        "STARE",
        "make demo &lt;here&gt;",
        "it is a toy &amp; says so",
        "pass@8",
        "did not hold",
    ):
        assert expected in page
    assert f"{summary['runs']['stare']['entropy_final']:.3f}" in page


def test_report_of_one_run(tmp_path):
    make_run(tmp_path, "stare", 3)
    with pytest.raises(UserError, match=r"config\.yaml"):
        write_report(tmp_path)
    (tmp_path / "config.yaml").write_text(
        "loss:\n  name: grpo\n  target_entropy: 0.3\nrun:\n  seed: 3\n"
    )
    page = write_report(tmp_path, command="train it").read_text(encoding="utf-8")
    assert "Seed 3" in page and "train it" in page and "Target entropy" not in page


def test_report_of_a_run_with_little_in_it(tmp_path):
    with Logbook(tmp_path) as book:
        book.write(1, {"entropy": 0.3})
    (tmp_path / "config.yaml").write_text("loss:\n  name: stare\n")
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert inlined_pngs(page) == 1 and "pass@" not in page


def test_report_of_nothing_names_what_is_missing(tmp_path):
    with pytest.raises(UserError, match=r"neither metrics\.jsonl"):
        write_report(tmp_path)
    (tmp_path / "summary.json").write_text('{"seed": 0}')
    with pytest.raises(UserError, match="target_entropy"):
        write_report(tmp_path)
