"""Logbook, summary, plots and report:
kills and resumes, naive twins of the statistics, a whole page.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stare.config import UserError
from megatron_stare.reporting import summary as statistics
from megatron_stare.reporting.logbook import Logbook, progress, read_metrics
from megatron_stare.reporting.plots import Run, arm_colours, mean_series, moving_mean, spread
from megatron_stare.reporting.report import write_report


def write_steps(directory: Path, steps: range, **constants: float) -> None:
    with Logbook(directory) as book:
        for step in steps:
            book.write(step, {"entropy": 0.1 * step, **constants})


# Logbook


def test_what_is_written_is_read_back(tmp_path):
    with Logbook(tmp_path) as book:
        book.write(1, {"entropy": torch.tensor(0.25), "gate": True, "note": "a", "k": np.int64(8)})
        on_disk = (tmp_path / "metrics.jsonl").read_bytes()
        assert on_disk.endswith(b"\n"), "the line is flushed before close"
        book.write(3, {"step": 3, "entropy": 0.5})
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 1, "entropy": 0.25, "gate": True, "note": "a", "k": 8},
        {"step": 3, "entropy": 0.5},
    ]


@pytest.mark.parametrize(
    "bad", [math.nan, math.inf, -math.inf, torch.tensor(math.nan), torch.zeros(2), None, [1.0]]
)
def test_a_value_that_json_cannot_hold_is_refused_by_name_and_nothing_is_written(tmp_path, bad):
    with Logbook(tmp_path) as book:
        book.write(1, {"loss": 1.0})
        with pytest.raises(ValueError, match="'grad_norm'"):
            book.write(2, {"loss": 1.0, "grad_norm": bad})
        book.write(2, {"loss": 2.0})
    assert [row["step"] for row in read_metrics(book.path)] == [1, 2]


def test_steps_only_go_up(tmp_path):
    with Logbook(tmp_path) as book:
        book.write(5, {})
        for step in (5, 4):
            with pytest.raises(ValueError, match="not after step 5"):
                book.write(step, {})
        with pytest.raises(ValueError, match="in a line for step 6"):
            book.write(6, {"step": 7})


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 400), st.integers(-1, 12))
def test_a_run_cut_at_any_byte_resumes_with_every_kept_step_once(tmp_path_factory, cut, resume):
    """Naive twin: a step survives where its whole object is before
    the cut and it is not to be repeated.
    """
    directory = tmp_path_factory.mktemp("run")
    write_steps(directory, range(1, 11))
    path = directory / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    ends = [match.end() for match in re.finditer(rb"\}", whole)]
    survivors = [step for step, end in enumerate(ends, start=1) if end <= cut]
    assert [row["step"] for row in read_metrics(path)] == survivors
    kept = [step for step in survivors if step <= resume]
    with Logbook(directory, resume_from_step=resume) as book:
        book.write(50, {"entropy": 1.0})
    assert [row["step"] for row in read_metrics(path)] == [*kept, 50]
    assert [child.name for child in directory.iterdir()] == ["metrics.jsonl"], (
        "no temporary file is left"
    )


def test_a_damaged_line_elsewhere_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for damaged in ('{"step": 2, "lo', "[1]", '{"loss": 1}', '{"step": 1.5}'):
        path.write_text('{"step": 1}\n' + damaged + '\n{"step": 3}\n')
        with pytest.raises(UserError, match=r"metrics\.jsonl:2"):
            read_metrics(path)
        path.write_text('{"step": 1}\n' + damaged + "\n")
        with pytest.raises(UserError, match=r"metrics\.jsonl:2"):
            read_metrics(path)  # ended by a line feed: not torn by a kill
    with pytest.raises(UserError, match="nowhere"):
        read_metrics(tmp_path / "nowhere")


def test_a_new_run_does_not_write_over_an_old_one(tmp_path):
    write_steps(tmp_path, range(1, 4))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match="steps up to 3"):
        Logbook(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_tensorboard_mirror(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Logbook(tmp_path, tensorboard=True) as book:
        book.write(1, {"entropy": 0.5, "note": "a"})
        book.write(2, {"entropy": 0.25})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["entropy"]
    assert [(event.step, event.value) for event in events.Scalars("entropy")] == [
        (1, 0.5),
        (2, 0.25),
    ]


def test_progress_is_sparse_without_a_terminal():
    output = io.StringIO()
    with progress("SFT", 400, completed=100, stream=output) as bar:
        for step in range(300):
            bar.advance(loss=1 / (step + 3))
    lines = output.getvalue().splitlines()
    assert [int(re.search(r"(\d+)/400", line)[1]) for line in lines] == [
        101,
        120,
        160,
        200,
        240,
        280,
        320,
        360,
        400,
    ]
    assert lines[0].startswith("SFT  101/400") and "loss 0.333" in lines[0]
    silent = io.StringIO()
    with progress("SFT", 2, enabled=False, stream=silent) as bar:
        bar.advance(2, loss=1.0)
    assert silent.getvalue() == ""


def test_progress_draws_a_bar_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    output = Terminal()
    with progress("RL", 3, stream=output) as bar:
        for _ in range(3):
            bar.advance(reward=0.5)
    assert "3/3" in output.getvalue() and "RL" in output.getvalue()


# Statistics


def test_pass_at_k_agrees_with_enumeration():
    for samples in range(1, 8):
        for correct, k in itertools.product(range(samples + 1), range(1, samples + 1)):
            draws = list(itertools.combinations([1] * correct + [0] * (samples - correct), k))
            expected = sum(any(draw) for draw in draws) / len(draws)
            assert statistics.pass_at_k(samples, correct, k) == pytest.approx(expected, abs=1e-15)
        assert statistics.avg_at_k(samples, correct) == statistics.pass_at_k(samples, correct, 1)


@pytest.mark.parametrize(
    ("samples", "correct", "k"), [(8, 9, 1), (8, -1, 1), (8, 4, 0), (8, 4, 9), (0, 0, 1)]
)
def test_impossible_counts_raise(samples, correct, k):
    with pytest.raises(ValueError, match=r"pass@k|impossible"):
        statistics.pass_at_k(samples, correct, k)


def t_density_mass(quantile: float, freedom: int) -> float:
    """P(|T| <= quantile) by Simpson's rule on Student's density."""
    scale = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
    x = np.linspace(0, quantile, 20001)
    y = scale * (1 + x * x / freedom) ** (-(freedom + 1) / 2)
    return 2 * (x[1] / 3) * (y[0] + y[-1] + 4 * y[1:-1:2].sum() + 2 * y[2:-1:2].sum())


def test_the_t_table_holds_95_percent():
    assert len(statistics.T_975) == 30
    for freedom, quantile in enumerate(statistics.T_975, start=1):
        assert t_density_mass(quantile, freedom) == pytest.approx(0.95, abs=1e-4)


def test_intervals():
    assert statistics.mean_and_interval([0.5]) == (0.5, None)
    values = [0.661, 0.609, 0.588]
    mean, half = statistics.mean_and_interval(values)
    assert mean == pytest.approx(np.mean(values))
    assert half == pytest.approx(4.303 * np.std(values, ddof=1) / math.sqrt(3))
    draws = np.random.default_rng(0).normal(2.0, 3.0, size=(4000, 3)).tolist()
    covered = [
        abs(interval[0] - 2.0) <= interval[1]
        for interval in map(statistics.mean_and_interval, draws)
    ]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.015)
    with pytest.raises(ValueError, match="at least one"):
        statistics.mean_and_interval([])


@pytest.mark.parametrize("steps", [1, 2, 7, 10, 25, 200])
def test_summary_agrees_with_numpy(tmp_path, steps):
    rng = random.Random(steps)
    entropy = [rng.uniform(0.1, 0.5) for _ in range(steps)]
    with Logbook(tmp_path) as book:
        book.write(0, {"eval/heldout_hard/avg_at_k": 0.1, "eval/heldout_hard/k": 8})
        for step, value in enumerate(entropy, start=1):
            row = {"entropy": value, "reward": value / 2, "seconds_total": 0.25}
            if step == steps:
                for name, avg in (("heldout_hard", 0.6), ("heldout_easy", 0.8)):
                    row |= {
                        f"eval/{name}/avg_at_k": avg,
                        f"eval/{name}/pass_at_k": 0.9,
                        f"eval/{name}/k": 16,
                    }
            book.write(step, row)
    summary = statistics.summarize_run(tmp_path, 0.3)
    tail = entropy[-math.ceil(steps / 10) :]
    half = np.array(entropy[-math.ceil(steps / 2) :])
    assert summary["entropy_initial"] == entropy[0]
    assert summary["entropy_final"] == pytest.approx(np.mean(tail))
    assert summary["train_reward_final"] == pytest.approx(np.mean(tail) / 2)
    assert summary["entropy_in_band_fraction"] == pytest.approx(np.mean(abs(half - 0.3) <= 0.075))
    assert (
        summary["heldout_avg_at_k"],
        summary["heldout_pass_at_k"],
        summary["easy_avg_at_k"],
    ) == (0.6, 0.9, 0.8)
    assert (summary["k"], summary["steps"], summary["seconds"]) == (
        16,
        steps,
        pytest.approx(steps / 4),
    )


def test_a_run_without_steps_is_an_error(tmp_path):
    write = Logbook(tmp_path)
    write.close()
    with pytest.raises(UserError, match="no step with an entropy"):
        statistics.summarize_run(tmp_path, 0.3)


def arm_numbers(**changes: float) -> dict[str, float]:
    numbers = {
        "entropy_final": 0.28,
        "entropy_in_band_fraction": 1.0,
        "heldout_pass_at_k": 0.96,
        "easy_avg_at_k": 0.9,
    }
    return numbers | changes


def test_a_claim_that_fails_in_one_seed_does_not_hold():
    good = {
        "grpo_ds": arm_numbers(entropy_final=0.08, heldout_pass_at_k=0.0, easy_avg_at_k=0.9),
        "stare": arm_numbers(),
    }
    bad = {
        "grpo_ds": good["grpo_ds"],
        "stare": arm_numbers(entropy_in_band_fraction=0.7, easy_avg_at_k=0.8),
    }
    assert all(
        finding.held
        for finding in statistics.check_comparison({"target_entropy": 0.3, "seeds": {"0": good}})
    )
    one_run = {"target_entropy": 0.3, "seed": 4, "runs": good}
    assert (
        len(statistics.check_comparison(one_run)) == 4
        and "seed 4" in statistics.check_comparison(one_run)[0].text
    )
    findings = statistics.check_comparison({"target_entropy": 0.3, "seeds": {"0": good, "1": bad}})
    assert [finding.held for finding in findings] == [False, True, True, False]
    assert "-0.100 (seed 1)" in findings[3].text
    assert (
        statistics.check_comparison(
            {"target_entropy": 0.3, "seeds": {"0": {"stare": arm_numbers()}}}
        )
        == []
    )


def test_seeds_are_combined_by_arm_and_key():
    seeds = {
        "0": {"stare": {"k": 8, "x": 1.0}},
        "1": {"stare": {"k": 8, "x": 3.0}, "dapo": {"x": None}},
    }
    assert statistics.mean_runs(seeds) == {"stare": {"k": 8, "x": 2.0}, "dapo": {"x": None}}


# Plots and page


def test_series_helpers_agree_with_numpy():
    rng = np.random.default_rng(0)
    values = rng.normal(size=50).tolist()
    series = list(enumerate(values))
    expected = [np.mean(values[max(0, at - 6) : at + 1]) for at in range(50)]
    assert [value for _, value in moving_mean(series, 7)] == pytest.approx(expected)
    assert mean_series([[(1, 0.0), (2, 2.0)], [(2, 4.0), (3, 9.0)]]) == [(2, 3.0)]
    assert mean_series([]) == []
    assert Run("stare", "0", [{"step": 1, "a": 2}, {"step": 2, "b": 1}]).series("a") == [(1, 2)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=6))
def test_labels_are_spread_as_little_as_needed(heights):
    apart = spread(heights, 12.0)
    ordered = sorted(apart)
    assert all(above - below >= 12.0 - 1e-9 for below, above in itertools.pairwise(ordered))
    assert sum(apart) == pytest.approx(sum(heights), abs=1e-6), "moved evenly up and down"
    if all(above - below >= 12.0 for below, above in itertools.pairwise(sorted(heights))):
        assert apart == pytest.approx(heights)


def test_colours_are_fixed_for_the_two_arms_and_distinct():
    colours = arm_colours(["x", "stare", "grpo_ds", "y"])
    assert (
        colours["stare"] == "#0072B2"
        and colours["grpo_ds"] == "#D55E00"
        and len(set(colours.values())) == 4
    )


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
    return statistics.summarize_run(directory, 0.3)


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
        "runs": statistics.mean_runs(seeds),
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
