"""Keys of an earlier version: old files are read, old overrides corrected, all of them listed."""

import copy

import pytest

from megatron_stare.__main__ import main
from megatron_stare.config import (
    Config,
    EvaluationSetConfig,
    UserError,
    dump,
    load,
    moved_keys,
    override,
)
from megatron_stare.config.limits import lookup
from megatron_stare.config.moved import MOVED, renamed
from tests.paths import ROOT

OLD = """\
scoring: {dynamic_sampling: false, max_generation_rounds: 3, accept_partial_batch: true,
          max_staleness: 2, reward: math}
train: {updates_per_rollout: 4, num_rollout: 7}
"""


def test_a_file_of_the_old_layout_is_read_and_each_move_told(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(OLD)
    config = load(file)
    rollout = config.rollout
    assert (rollout.dynamic_sampling, rollout.max_generation_rounds) == (False, 3)
    assert (rollout.accept_partial_batch, rollout.max_staleness) == (True, 2)
    assert (config.train.num_steps_per_rollout, config.train.num_rollout) == (4, 7)
    assert moved_keys(file) == [f"{old} is now {new}" for old, new in MOVED.items()]
    dump(config, file)
    assert load(file) == config and moved_keys(file) == []


def test_the_new_name_wins_where_both_are_there(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("scoring: {max_staleness: 2}\nrollout: {max_staleness: 5}\n")
    assert load(file).rollout.max_staleness == 5


PER_SET = """\
evaluation:
  eval_data: {held: a.jsonl, other: b.jsonl}
  per_set:
    held: {n_samples: 4, temperature: 0.0, top_p: 0.0, max_response_len: 0}
    other: {n_samples: 0, temperature: 0.6, top_p: 1.0, max_response_len: 9}
"""


def test_a_zero_that_meant_unset_is_unset(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("scoring: {max_staleness: 2}\n" + PER_SET)
    sets = load(file).evaluation.per_set
    assert sets["held"] == EvaluationSetConfig(n_samples=4)
    assert sets["other"] == EvaluationSetConfig(temperature=0.6, top_p=1.0, max_response_len=9)
    told = [line for line in moved_keys(file) if "meant unset" in line]
    assert told == [
        f"evaluation.per_set.{key}=0 meant unset and is now null"
        for key in ("held.temperature", "held.top_p", "held.max_response_len", "other.n_samples")
    ]
    dump(load(file), file)
    assert load(file).evaluation.per_set == sets and moved_keys(file) == []


def test_a_zero_of_today_is_a_zero(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("evaluation: {eval_data: {a: x}, per_set: {a: {temperature: 0, top_k: 0}}}\n")
    assert load(file).evaluation.per_set["a"] == EvaluationSetConfig(temperature=0.0, top_k=0)
    file.write_text(PER_SET)
    with pytest.raises(UserError, match=r"evaluation.per_set.held.top_p=0.0 is out of range"):
        load(file)


def test_the_tree_that_is_read_is_left_alone():
    tree = {"train": {"updates_per_rollout": 4}, "evaluation": {"per_set": {"a": {"top_p": 0}}}}
    before = copy.deepcopy(tree)
    renamed(tree)
    assert tree == before


@pytest.mark.parametrize("content", ["[1, 2]", "text", "a: [", "\x00"])
def test_a_file_that_is_no_config_is_one_error(tmp_path, content):
    file = tmp_path / "config.yaml"
    file.write_text(content)
    assert moved_keys(file) == []
    with pytest.raises(UserError, match=r"written by a run of this version \(\d.* or an earl"):
        load(file)


@pytest.mark.parametrize("old", MOVED)
def test_an_override_under_the_old_name_is_refused_with_the_new_one(old):
    with pytest.raises(UserError, match=f"^{old} is now {MOVED[old]}; write {MOVED[old]}=1$"):
        override(Config(), [f"{old}=1"])


def test_every_new_name_is_a_field_and_the_changelog_lists_every_pair():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    for old, new in MOVED.items():
        assert lookup(Config(), new) is not None and lookup(Config(), old) is None
        assert f"| `{old}` | `{new}` |" in changelog


def test_the_command_says_which_keys_moved(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(OLD)
    assert main(["train", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "policy.hf_checkpoint is empty" in said
    told = [line for line in said.splitlines() if " is now " in line]
    assert told == [f"{tmp_path}/config.yaml: {old} is now {new}" for old, new in MOVED.items()]
