"""Figures of a machine that a user writes before the GPUs are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_stare.config import UserError
from megatron_stare.planning.machine import H100, read_machine


def test_figures_may_have_exponents(tmp_path: Path) -> None:
    """141e9 is a text to YAML."""
    file = tmp_path / "h200.yaml"
    file.write_text("name: H200-141GB\nmemory_bytes: 141e9\ngpus_per_node: 4.0\n")
    machine = read_machine(file)
    assert machine.memory_bytes == 141e9 and machine.node_rate == H100.node_rate
    assert type(machine.gpus_per_node) is int and machine.gpus_per_node == 4
    for wrong in ("memory_bytes: 141G", "memory_bytes: true", "gpus_per_node: 4.5"):
        file.write_text(wrong)
        with pytest.raises(UserError, match="must be a positive"):
            read_machine(file)
