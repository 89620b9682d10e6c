"""The claims of the quickstart hold or do not."""

from __future__ import annotations

from megatron_stare.reporting import summary


def arm_numbers(**changes: float) -> dict[str, float]:
    numbers = {
        "target_entropy": 0.3,
        "entropy_final": 0.28,
        "entropy_in_band_fraction": 1.0,
        "eval/heldout_hard/pass_at_k": 0.96,
        "eval/heldout_easy/avg_at_k": 0.9,
    }
    return numbers | changes


def test_a_claim_that_fails_in_one_seed_does_not_hold():
    good = {
        "grpo_ds": arm_numbers(**{"entropy_final": 0.08, f"eval/{summary.HARD}/pass_at_k": 0.0}),
        "stare": arm_numbers(),
    }
    bad = {
        "grpo_ds": good["grpo_ds"],
        "stare": arm_numbers(
            **{"entropy_in_band_fraction": 0.7, f"eval/{summary.EASY}/avg_at_k": 0.8}
        ),
    }
    assert all(finding.held for finding in summary.check_comparison({"seeds": {"0": good}}))
    one_run = {"seed": 4, "runs": good}
    assert (
        len(summary.check_comparison(one_run)) == 4
        and "seed 4" in summary.check_comparison(one_run)[0].text
    )
    findings = summary.check_comparison({"seeds": {"0": good, "1": bad}})
    assert [finding.held for finding in findings] == [False, True, True, False]
    assert "-0.100 (seed 1)" in findings[3].text
    assert summary.check_comparison({"seeds": {"0": {"stare": arm_numbers()}}}) == []
