"""Keys of an earlier version: old files are read, old overrides corrected, all of them listed."""

import subprocess
import sys

import pytest

from megatron_stare.config import Config, UserError, dump, load, moved_keys, override
from megatron_stare.config.limits import lookup
from megatron_stare.config.moved import MOVED
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


@pytest.mark.parametrize("content", ["[1, 2]", "text", "a: [", "\x00"])
def test_a_file_that_is_no_config_is_one_error(tmp_path, content):
    file = tmp_path / "config.yaml"
    file.write_text(content)
    assert moved_keys(file) == []
    with pytest.raises(UserError, match="written by a run"):
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


def test_the_command_says_which_keys_moved(tmp_path):
    (tmp_path / "config.yaml").write_text(OLD)
    command = [sys.executable, "-m", "megatron_stare", "train", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "policy.hf_checkpoint is empty" in done.stderr
    told = [line for line in done.stderr.splitlines() if " is now " in line]
    assert told == [f"{tmp_path}/config.yaml: {old} is now {new}" for old, new in MOVED.items()]
