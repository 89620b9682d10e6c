"""The optimizer's state on the host between updates: memory given back, no bit changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy.optimizer import to_device, to_host
from megatron_stare.policy.topology import Topology
from tests.memory import peak_bytes
from tests.small_run import rows_of, small_config

SETTINGS = ("train.num_rollout=3", "run.save_interval=1", "run.keep_last=3")


@pytest.mark.parametrize(
    ("dtype", "spread"), [pytest.param("fp32", "false", marks=pytest.mark.slow), ("bf16", "true")]
)
def test_training_and_checkpoints_are_the_same_with_the_state_on_the_host(
    dtype: str, spread: str, tmp_path: Path, topology: Topology
) -> None:
    options = (f"policy.dtype={dtype}", f"policy.use_distributed_optimizer={spread}", *SETTINGS)
    found = []
    for offload in ("false", "true"):
        place = f"run.dir={tmp_path}/{offload}"
        config = small_config(
            tmp_path, *options, place, f"policy.offload_while_generating={offload}"
        )
        trainer = Trainer(config, topology)
        assert trainer.run(Interrupt())
        assert trainer.actor.is_on_host == (offload == "true")
        found.append((rows_of(config), trainer.actor.fingerprint()))
        # taken up from a checkpoint that was saved while the state was on the host
        resumed = Trainer(config, topology, load="step_00000002")
        assert resumed.run(Interrupt())
        found.append((rows_of(config), resumed.actor.fingerprint()))
    assert all(one == found[0] for one in found)


def test_moving_out_frees_gradient_buffers_and_the_places_it_leaves(
    tmp_path: Path, topology: Topology
) -> None:
    config = small_config(
        tmp_path, "policy.dtype=bf16", "policy.offload_while_generating=true", "train.num_rollout=1"
    )
    trainer = Trainer(config, topology)
    assert trainer.run(Interrupt())
    actor = trainer.actor
    buffers = [buffer.grad_data for chunk in actor.runnable for buffer in chunk.buffers]
    assert [buffer.untyped_storage().nbytes() for buffer in buffers] == [0] * len(buffers)
    moments = [
        state[name]
        for part in actor.optimizer.chained_optimizers
        for state in part.optimizer.state.values()
        for name in ("exp_avg", "exp_avg_sq")
    ]
    before = [moment.clone() for moment in moments]

    block = actor._host_block
    stored = {moment.untyped_storage().data_ptr() for moment in moments}
    assert stored == {block.data_ptr()}, "one block has all of them"

    def twice() -> None:
        for _ in range(2):
            to_device(actor.optimizer)
            assert to_host(actor.optimizer, block) is block

    state = 3 * sum(moment.nbytes for moment in moments) // 2  # moments and fp32 copies
    largest = max(moment.nbytes for moment in moments)
    peak = peak_bytes(twice)
    assert state <= peak <= state + largest, "the places left are free again"
    assert all(torch.equal(a, b) for a, b in zip(moments, before, strict=True))
