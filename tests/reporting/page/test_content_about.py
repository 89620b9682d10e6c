"""Description of runs: settings of arms next to each other, environments of their starts."""

from __future__ import annotations

import json

from benchmarks._synthetic_run import write_run
from megatron_stare.reporting.page.content import about_of
from megatron_stare.reporting.page.runs import Run, Source
from megatron_stare.reporting.provenance import STARTS_NAME, read_starts, record_start


def source(*runs: Run) -> Source:
    return Source(runs[0].directory, list(runs), None, None)


def run_with(directory, arm, settings, starts=()):
    directory.mkdir()
    (directory / "config.yaml").write_text(settings)
    lines = "".join(json.dumps(start) + "\n" for start in starts)
    (directory / STARTS_NAME).write_text(lines)
    return Run(arm, "0", directory, [], {})


def test_settings_are_split_into_those_that_differ_and_those_that_do_not(tmp_path):
    shared = "optimizer: {lr: 0.003}\nrun: {seed: 5, dir: x}\n"
    one = run_with(tmp_path / "a", "GRPO-ds", shared + "loss: {name: grpo_ds}\n")
    other = run_with(tmp_path / "b", "STARE", shared + "loss: {name: stare, adaptive: true}\n")
    found = about_of([source(one, other)])
    differing = {key: values for key, _, *values in found["differing"]}
    assert differing["loss.adaptive"] == ["false", "true"]
    assert set(differing) <= {"loss.adaptive", "loss.name"}, "the default's name may be either"
    assert [row for row in found["common"] if row[0] == "optimizer.lr"] == [
        ["optimizer.lr", "1e-06", "0.003"]
    ]
    assert not {"run.dir", "run.seed"} & {row[0] for row in found["common"]}
    assert found["commands"] == ["the command was not recorded"]


def test_an_unreadable_configuration_is_named_and_hides_no_other(tmp_path):
    one = run_with(tmp_path / "a", "old", "loss: {of_another_version: 1}\n")
    other = run_with(tmp_path / "b", "STARE", "loss: {adaptive: true}\n")
    [row] = about_of([source(one, other)])["differing"]
    assert row == ["loss.adaptive", "false", "not recorded", "true"]


def test_runs_of_one_environment_share_a_card_and_others_have_their_own(tmp_path):
    here = {"time": "2026-11-25T01:00:00+00:00", "commit": "abc", "ranks": 1}
    here |= {"versions": {"megatron_stare": "0.2.0", "torch": "2.11.0", "transformers": ""}}
    here |= {"machine": {"processor": "P", "cores": 2, "memory_gib": 23.0, "gpus": []}}
    later = here | {"time": "2026-11-25T03:00:00+00:00"}
    gpus = here | {"machine": {"gpus": ["H100", "H100"], "driver": "570.1", "processor": "Q"}}
    runs = [
        run_with(tmp_path / "a", "GRPO-ds", "", [here, later]),
        run_with(tmp_path / "b", "STARE", "", [here]),
        run_with(tmp_path / "c", "STARE", "", [gpus]),
        run_with(tmp_path / "d", "STARE", ""),
    ]
    first, second, third = about_of([source(*runs)])["starts"]
    assert first["runs"] == [0, 1] and second["runs"] == [2]
    facts = dict(first["facts"])
    assert facts["Started"] == "2026-11-25 01:00 to 2026-11-25 03:00 UTC, 3 starts"
    assert facts["Versions"] == "torch 2.11.0" and facts["Commit"] == "abc"
    assert facts["GPUs"] == "none" and facts["Processor"] == "P, 2 cores, 23.0 GiB"
    assert dict(second["facts"])["GPUs"] == "2 x H100, driver 570.1"
    assert third == {"runs": [3], "facts": []}


def test_a_recorded_start_is_read_back_and_a_torn_one_is_left_out(tmp_path):
    write_run(tmp_path / "run", 2)
    record_start(tmp_path / "run", 4)
    with (tmp_path / "run" / STARTS_NAME).open("a") as file:
        file.write('{"time": "20')
    [start] = read_starts(tmp_path / "run")
    assert start["ranks"] == 4 and start["versions"]["torch"] and start["machine"]["cores"] >= 1
    assert "host" not in json.dumps(start).lower()
