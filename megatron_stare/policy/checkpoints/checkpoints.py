"""The checkpoints of one run: step_00000050/ and so on, through megatron.core.dist_checkpointing.

A checkpoint is written to a temporary directory, hashed, renamed when whole, and only then named by
`latest`: a kill at any moment leaves the previous one. Each is complete in itself: weights,
optimizer, schedule, the loop's state, the run's config, and the HF config and tokenizer files, so
that `convert megatron-to-hf` needs nothing else.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from megatron_stare import config as configuration
from megatron_stare.config import RunConfig, UserError
from megatron_stare.policy import manifest
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.build import DTYPES
from megatron_stare.policy.checkpoints import actor_state
from megatron_stare.policy.checkpoints.names import (
    BEST,
    LATEST,
    LATEST_GOOD,
    STEP,
    best_in,
    listed,
    require_named,
    step_of,
)
from megatron_stare.policy.huggingface import files as hf_files
from megatron_stare.policy.topology import Topology
from megatron_stare.system import BestEffort, atomic_write, file_digest, sync_directory

_WRITING, _SET_ASIDE = ".writing_", "set_aside_"
_FOLLOWED = "load_followed"  # the Slurm job and the attempt of it that began with this --load


class CheckpointDirectory:
    """Finds the checkpoints in `directory`. Every method is collective."""

    def __init__(self, directory: Path, topology: Topology) -> None:
        self.directory, self.topology = directory, topology

    def find(self, load: str = LATEST, claim: bool = True) -> Path | None:
        """The checkpoint to continue from, every file of it verified;
        None where the run has none yet.

        `load`: 'latest'; 'latest-good', the newest without damage; 'best', by run.keep_best; or the
        name of one, like step_00000050. To `claim` it gives newer checkpoints another name: nothing
        is removed or written over. A Slurm job that is requeued repeats its command: it goes back
        in its first attempt only.
        UserError: it is damaged or missing, naming the file.
        """
        if claim and load not in (LATEST, LATEST_GOOD):
            load = self.topology.gather(self._unless_followed(load))[0]
        asked, newest_first = load, self._names()
        if load == BEST:
            load = self.topology.gather(best_in(self.directory)[0])[0]
        if load not in (LATEST, LATEST_GOOD):
            require_named(asked, load, self.directory, newest_first)
            newest_first = [load]
        for name in newest_first:
            damages = verify(self.directory / name, self.topology)
            if not damages:
                if claim:
                    self._claim(name, asked)
                return self.directory / name
            if load != LATEST_GOOD:
                raise UserError(
                    f"{self.directory / name} is damaged: {damages[0]}; --load latest-good takes "
                    "an older one"
                )
            if self.topology.is_first:
                print(
                    f"{self.directory / name} is damaged: {damages[0]}; looking for an older one",
                    file=sys.stderr,
                )
        if newest_first:
            raise UserError(
                f"{self.directory}: every checkpoint is damaged; choose another run.dir"
            )
        return None

    def _names(self) -> list[str]:
        """All step directories, newest first, as the first rank sees them. UserError:
        `latest` names a missing one.
        """
        names = [path.name for path in reversed(listed(self.directory))]
        pointer = self.directory / LATEST
        named = pointer.read_text().strip() if pointer.is_file() else ""
        names, named = self.topology.gather((names, named))[0]
        if named and named not in names:
            raise UserError(
                f"{pointer} names {named}, which is missing; put it back or remove {pointer}"
            )
        return names

    def _claim(self, name: str, load: str) -> None:
        """Make it the newest, which `load` asked for. UserError: the directory is not writable."""
        try:
            _on_first_rank(self.topology, lambda: self._make_newest(name, load))
        except SaveError as error:
            raise UserError(
                f"{self.directory} cannot be written ({error}); make room or mend its permissions"
            ) from None

    def _make_newest(self, name: str, load: str) -> None:
        for newer in listed(self.directory):
            if newer.name > name:
                print(f"{newer} was set aside as {_set_aside(newer).name}", file=sys.stderr)
        self._point_to(name)
        job, attempt = _slurm_attempt()
        if job and load not in (LATEST, LATEST_GOOD):
            atomic_write(self.directory / _FOLLOWED, f"{job} {attempt} {load}", durable=True)

    def _unless_followed(self, load: str) -> str:
        """`load`, or LATEST where an earlier attempt of this Slurm job has begun with it."""
        marker, (job, attempt) = self.directory / _FOLLOWED, _slurm_attempt()
        before = marker.read_text().split() if job and marker.is_file() else []
        if before[::2] != [job, load] or int(before[1]) >= attempt:
            return load
        if self.topology.is_first:
            print(
                f"--load {load} was followed in attempt {before[1]} of job {job}; this one resumes "
                "from the newest checkpoint",
                file=sys.stderr,
            )
        return LATEST

    def _point_to(self, name: str) -> None:
        atomic_write(self.directory / LATEST, name, durable=True)


class Checkpoints(CheckpointDirectory):
    """Saves and finds the checkpoints in `directory`. Every method is collective.

    A checkpoint that cannot be written (a full disk) does not end a run: a warning is
    printed, the older ones stay, and `failure` says why until a later save succeeds.
    """

    def __init__(self, actor: Actor, directory: Path, config: RunConfig) -> None:
        super().__init__(directory, actor.topology)
        self.actor, self.config = actor, config
        self.pending: tuple[int, Path, Save] | None = None
        self.failure = ""
        self.saved: int | None = None  # the step last saved or loaded
        self._evaluated: dict[int, float] = {}  # step -> value of run.keep_best
        self._best_effort = BestEffort("that checkpoint is kept, and removed later")

    def save(self, step: int, loop_state: dict[str, Any]) -> None:
        """Write checkpoint `step`, or begin to (run.async_save)."""
        self.finish()
        name = self.topology.gather(f"{_WRITING}{step:08d}_{uuid.uuid4().hex[:8]}")[0]
        temporary = self.directory / name
        with self._failures_reported(step, temporary):
            _on_first_rank(self.topology, lambda: self._prepare(temporary))
            content = actor_state.of_actor(self.actor, loop_state)
            save = Save(content, temporary, self.topology, self.config.async_save)
            self.pending = (step, temporary, save)
        if not self.config.async_save:
            self.finish()

    def due(self, step: int) -> bool:
        """Whether run.save_interval asks for a checkpoint at this step."""
        interval = self.config.save_interval
        return interval > 0 and step % interval == 0

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a step that may be saved next; run.keep_best may be among them."""
        if self.config.keep_best in metrics:
            self._evaluated[step] = metrics[self.config.keep_best]

    def save_last(self, step: int, state: Callable[[], dict[str, Any]]) -> None:
        """Save the step from which the run can continue, unless it is saved already; nothing before
        the first step. UserError: it could not be written.
        """
        self.finish()
        if step and self.saved != step:
            self.save(step, state())
            self.finish()
        if self.failure:
            raise UserError(
                f"the last checkpoint was not written ({self.failure}); mend that (of a full disk: "
                "make room) and resume the run"
            )

    def poll(self) -> None:
        """Finish a save in the background once every rank has written its part."""
        if self.pending and self.pending[2].written():
            self.finish()

    def finish(self) -> None:
        """Wait for the save under way, if any, and make it the latest."""
        if self.pending is None:
            return
        (step, temporary, save), self.pending = self.pending, None
        value = self._evaluated.pop(step, None)
        with self._failures_reported(step, temporary):
            save.finish()
            _on_first_rank(self.topology, lambda: self._publish(step, temporary, value))
            self.saved = step

    @contextmanager
    def _failures_reported(self, step: int, temporary: Path) -> Iterator[None]:
        try:
            yield
        except SaveError as error:
            self.failure = str(error)
            if self.topology.is_first:
                shutil.rmtree(temporary, ignore_errors=True)
                print(
                    f"warning: checkpoint {step} not written: {error}; the older ones stand",
                    file=sys.stderr,
                )
        else:
            self.failure = ""

    def load(self, checkpoint: Path) -> dict[str, Any]:
        """Restore model, optimizer, schedule; returns the loop's state. UserError: unreadable."""
        self.saved = step_of(checkpoint)
        return actor_state.into_actor(self.actor, checkpoint)

    def _prepare(self, temporary: Path) -> None:
        """Make a directory that no orphan of an earlier process writes into; remove leftovers."""
        for leftover in self.directory.glob(f"{_WRITING}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        temporary.mkdir(parents=True)
        policy = self.actor.config.policy
        hf_files.copy_description(Path(policy.hf_checkpoint), temporary)
        hf_files.set_dtype(temporary, DTYPES[policy.dtype])
        configuration.dump(self.actor.config, temporary / "config.yaml")

    def _publish(self, step: int, temporary: Path, value: float | None) -> None:
        final = self.directory / f"{STEP}{step:08d}"
        if final.exists():
            _set_aside(final)
        temporary.rename(final)
        sync_directory(self.directory)
        self._point_to(final.name)
        best = self._best_with(final.name, value) if self.config.keep_best else ""
        kept_every = self.config.keep_every
        older = [path for path in listed(self.directory) if path.name <= final.name]
        for old in older[: -max(1, self.config.keep_last)]:
            if old.name != best and not (kept_every and step_of(old) % kept_every == 0):
                self._best_effort(functools.partial(shutil.rmtree, old))

    def _best_with(self, name: str, value: float | None) -> str:
        """The name of the best checkpoint, which this new one of `value` may be now."""
        best, highest, metric = best_in(self.directory)
        if metric != self.config.keep_best or best == name:  # the latter: of one that was set aside
            best = ""
        if value is not None and (not best or value > highest):
            best = name
            content = f"{best} {value!r} {self.config.keep_best}"
            atomic_write(self.directory / BEST, content, durable=True)
        elif not best:
            (self.directory / BEST).unlink(missing_ok=True)
        return best


def verify(checkpoint: Path, topology: Topology) -> list[str]:
    """The differences from the manifest, a line each, on every rank; ranks share the reading."""
    files, unreadable = dict[str, str](), list[str]()
    try:
        files = manifest.read(checkpoint)
    except (ValueError, OSError) as error:
        unreadable = [str(error)]
    own = dict(sorted(files.items())[topology.rank :: topology.world_size])
    found = manifest.damages(checkpoint, own)
    return unreadable + [line for part in topology.gather(found) for line in part]


def _slurm_attempt() -> tuple[str, int]:
    """The Slurm job of this process, "" outside of one; and how often it was requeued."""
    get = os.environ.get
    return get("SLURM_JOB_ID", ""), int(get("SLURM_RESTART_COUNT") or 0)


def _set_aside(checkpoint: Path) -> Path:
    number = 0
    while (aside := checkpoint.with_name(f"{_SET_ASIDE}{number}_{checkpoint.name}")).exists():
        number += 1
    return checkpoint.rename(aside)


class SaveError(Exception):
    """A checkpoint could not be written; what was there before is untouched."""


class _Resolved:
    """The data of every item of a plan, already resolved: the writer needs no more of a planner."""

    def __init__(self, data: dict[MetadataIndex, Any]) -> None:
        self.data = data

    def resolve_data(self, item: WriteItem) -> Any:
        # Written once: a background copy is given back item by item.
        return self.data.pop(item.index)


class _Writer(FileSystemWriter):
    """torch's writer in two parts: the data taken at once, the files written later."""

    def __init__(self, directory: Path, snapshot: bool) -> None:
        super().__init__(directory)
        self.directory, self.snapshot = directory, snapshot
        self.results: list[WriteResult] = []
        self.digests: dict[str, str] = {}
        self.failure = ""

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Called at the end of Megatron's planning."""
        self.plan = plan
        self.resolved = _Resolved(
            {item.index: self._host_copy(planner.resolve_data(item)) for item in plan.items}
        )

    def write(self) -> None:
        """Write and hash this rank's files; a failure is kept, and raised by `Save.finish`."""
        try:
            results = self.write_data(self.plan, self.resolved).wait()  # type: ignore[arg-type]
            names = {result.storage_data.relative_path for result in results}
            self.digests = {name: file_digest(self.directory / name) for name in sorted(names)}
            self.results = results
        except Exception as error:
            self.failure = _described(error)

    def _host_copy(self, data: Any) -> Any:
        if not isinstance(data, torch.Tensor):
            return data
        data = data.detach()
        return data.clone() if self.snapshot and data.device.type == "cpu" else data.to("cpu")


class Save:
    """One save through megatron.core.dist_checkpointing, in a part that blocks training and a part
    that does not. Methods are collective.

    It plans with all ranks and, in the background, copies this rank's tensors to host memory.
    Writing and hashing this rank's files is then work for a thread; where not in the background, it
    is done on construction. `finish` is collective again: Megatron's metadata, the manifest.
    Megatron's own background save forks the process, or its helper process survives when the
    trainer is killed.
    """

    def __init__(
        self, state: dict[str, Any], directory: Path, topology: Topology, background: bool
    ) -> None:
        """Plan and take the data. SaveError on every rank if any cannot."""
        self.directory, self.topology, self.background = directory, topology, background
        self.writer = _Writer(directory, snapshot=background)
        self.metadata = _planned(state, directory, self.writer, topology)
        self.thread = threading.Thread(target=self.writer.write, name="checkpoint")
        if background:
            self.thread.start()
        else:
            self.writer.write()

    def written(self) -> bool:
        """Whether every rank has written its files; the same answer on every rank."""
        done = torch.tensor([int(not self.thread.is_alive())], dtype=torch.int32)
        dist.all_reduce(done, op=dist.ReduceOp.MIN, group=self.topology.host)
        return bool(done.item())

    def finish(self) -> None:
        """Wait for the files; rank 0 adds metadata and manifest. SaveError on all ranks alike."""
        if self.background:
            self.thread.join()
        parts = self.topology.gather(
            (self.writer.failure, self.writer.results, self.writer.digests)
        )
        if failure := next((failure for failure, _, _ in parts if failure), ""):
            raise SaveError(failure)
        results = [results for _, results, _ in parts]
        digests = {name: digest for _, _, part in parts for name, digest in part.items()}
        _on_first_rank(self.topology, lambda: self._conclude(results, digests))

    def _conclude(self, results: list[list[WriteResult]], digests: dict[str, str]) -> None:
        from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

        assert self.metadata is not None, "rank 0 coordinated the plan"
        self.writer.finish(self.metadata, results)
        save_config(CheckpointingConfig("torch_dist", 1), str(self.directory))
        manifest.write(self.directory, digests)


def _on_first_rank(topology: Topology, action: Callable[[], None]) -> None:
    """Run it there; SaveError on every rank where it fails. Collective."""
    failure = ""
    if topology.is_first:
        try:
            action()
        except (OSError, UserError) as error:  # the latter of the model's files, which it copies
            failure = _described(error)
    if failure := topology.gather(failure)[0]:
        raise SaveError(failure)


def _planned(
    state: dict[str, Any], directory: Path, writer: _Writer, topology: Topology
) -> Metadata | None:
    """Megatron's plan of a save, its data taken by the writer; what several data-parallel ranks
    hold is shared out among them. The whole checkpoint's metadata on rank 0.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import exchange_utils
    from megatron.core.dist_checkpointing.strategies import fully_parallel
    from megatron.core.dist_checkpointing.strategies import torch as strategies
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
    from megatron.core.dist_checkpointing.strategies.state_dict_saver import (
        save_state_dict_async_plan,
    )

    metadata: Metadata | None = None

    class Strategy(strategies.TorchDistSaveShardedStrategy):
        """Megatron's checkpoint format, written by our writer."""

        def async_save(
            self, sharded_state_dict: Any, checkpoint_dir: Path, async_strategy: str = "mcore"
        ) -> Any:
            nonlocal metadata
            shares = exchange_utils.determine_main_replica_uniform_distribution(
                sharded_state_dict, topology.data
            )
            fully_parallel.distribute_main_replicas_with_precomputed_distribution(
                sharded_state_dict, topology.data, shares
            )
            named, _, _ = strategies._replace_state_dict_keys_with_sharded_keys(
                sharded_state_dict, True
            )
            plain = strategies.mcore_to_pyt_state_dict(named, False)
            planner = strategies.MCoreSavePlanner(
                dedup_replicated_tensors=False,
                flatten_state_dict=False,
                flatten_sharded_tensors=False,
            )
            (_, metadata, _), *_ = save_state_dict_async_plan(plain, writer, planner=planner)
            return AsyncRequest(None, (), [])

    dist_checkpointing.save(
        state, str(directory), Strategy(), async_sharded_save=True, async_strategy="mcore"
    )
    return metadata


def _described(error: BaseException) -> str:
    """The root of a failure in one line."""
    while (deeper := error.__cause__ or error.__context__) is not None:
        if error.__suppress_context__ and error.__cause__ is None:
            break  # raised from None: its text stands for what is below it
        error = deeper
    text = " ".join(str(error).split())
    return text or type(error).__name__
