"""run.keep_best: the checkpoint with the highest value of an evaluation's number."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron_stare.config import Config, UserError
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.checkpoints.names import best_in
from megatron_stare.policy.topology import Topology
from tests.policy.checkpoints.test_checkpoints import saved
from tests.small_run import rows_of, small_config


def evaluated(directory: Path, *options: str) -> Config:
    """A run that saves every step and evaluates every second one."""
    return small_config(
        directory,
        "run.save_interval=1",
        "run.keep_last=1",
        "evaluation.eval_interval=2",
        "evaluation.n_samples_per_eval_prompt=4",
        f"evaluation.eval_data.held={directory}/problems.jsonl",
        *options,
    )


METRIC = "eval/held/avg_at_k"
BEST = ("train.num_rollout=8", "run.seed=1", f"run.keep_best={METRIC}")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of model, problems and a finished run of BEST."""
    directory = tmp_path_factory.mktemp("best")
    config = evaluated(directory, *BEST)
    assert Trainer(config, topologies.start(config.policy)).run(Interrupt())
    topologies.stop()
    return directory


def copied(trained: Path, directory: Path, *options: str) -> Config:
    """The finished run in another directory, with other options."""
    run = directory / "run"
    if not run.exists():
        shutil.copytree(trained / "run", run)
    return evaluated(trained, *options, f"run.dir={run}")


def test_the_best_checkpoint_is_kept_and_taken_on_request(
    trained: Path, tmp_path: Path, topology: Topology
) -> None:
    metric, config = METRIC, copied(trained, tmp_path, *BEST)
    values = {row["step"]: row[metric] for row in rows_of(config) if metric in row}
    best = max(values, key=lambda step: (values[step], -step))
    assert len(values) == 4 and best < 8, f"choose a seed whose best step is not the last: {values}"
    assert saved(config) == ["best", "latest", f"step_{best:08d}", "step_00000008"]
    pointer = Path(config.run.dir) / "checkpoints/best"
    assert pointer.read_text() == f"step_{best:08d} {values[best]!r} {metric}"

    # Another metric starts over, and no metric keeps the newest alone.
    another = "run.keep_best=eval/held/pass_at_k"
    other = copied(trained, tmp_path, "train.num_rollout=10", "run.seed=1", another)
    assert Trainer(other, topology).run(Interrupt())
    assert saved(other) == ["best", "latest", "step_00000010"]
    assert pointer.read_text().startswith("step_00000010 ")
    plain = copied(trained, tmp_path, "train.num_rollout=11", "run.seed=1")
    assert Trainer(plain, topology).run(Interrupt())
    assert saved(plain) == ["best", "latest", "step_00000011"]
    with pytest.raises(UserError, match=r"--load best: none in .*checkpoints; set run\.keep_best"):
        Trainer(plain, topology, load="best").run(Interrupt())


@pytest.mark.parametrize("content", ["", "step_00000002", "step_00000002 high metric"])
def test_a_damaged_pointer_to_the_best_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "best").write_text(content)
    with pytest.raises(UserError, match=r"best is damaged \(.*\); remove it"):
        best_in(tmp_path)


def test_a_run_continues_from_its_best_checkpoint(
    trained: Path, tmp_path: Path, topology: Topology
) -> None:
    config = copied(trained, tmp_path, *BEST)
    name = (Path(config.run.dir) / "checkpoints/best").read_text().split()[0]
    before = rows_of(config)
    trainer = Trainer(config, topology, load="best")
    assert trainer.run(Interrupt()) and trainer.step == 8
    assert rows_of(config) == before, "the same steps again"
    assert [each for each in saved(config) if "aside" in each] == ["set_aside_0_step_00000008"]
    assert name in saved(config)


def test_the_value_of_a_checkpoint_that_was_set_aside_does_not_count(
    trained: Path, tmp_path: Path, topology: Topology
) -> None:
    config = copied(trained, tmp_path, *BEST)
    pointer = Path(config.run.dir) / "checkpoints/best"
    earlier = pointer.read_text().split()[0]
    pointer.write_text(f"step_00000008 9.0 {METRIC}")
    assert Trainer(config, topology, load=earlier).run(Interrupt())
    number = int(earlier.removeprefix("step_"))
    values = {row["step"]: row[METRIC] for row in rows_of(config) if METRIC in row}
    later = {step: value for step, value in values.items() if step > number}
    best = max(later, key=lambda step: (later[step], -step))
    assert pointer.read_text() == f"step_{best:08d} {later[best]!r} {METRIC}"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("run.keep_best=eval/other/avg_at_k",), "not one of eval/held/avg_at_k, eval/held/pass"),
        (("run.keep_best=eval/held/avg_at_k", "run.save_interval=4"), "set run.save_interval=2$"),
        (("run.keep_best=eval/held/avg_at_k", "evaluation.eval_interval=0"), "and eval_interval=5"),
    ],
)
def test_a_best_that_cannot_be_chosen_is_refused(
    overrides: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=words):
        evaluated(tmp_path, *overrides)
