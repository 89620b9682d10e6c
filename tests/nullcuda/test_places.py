"""Single places that CUDA decides and that no larger run enters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_stare.commands.gpuday import kernels
from megatron_stare.commands.gpuday.gpuday import seen_gpus
from megatron_stare.config import Config, override
from megatron_stare.debug import doctor
from megatron_stare.loop import progress
from megatron_stare.numerics.token_stats import tile_of
from megatron_stare.policy.model import PolicyModel
from megatron_stare.policy.topology import Topology
from megatron_stare.policy.tuning import Hardware, hardware
from tests.rollout.sglang.fake_server import fake_servers
from tests.tiny_models import tiny_config, write_checkpoint

pytestmark = pytest.mark.nullcuda


def test_the_random_state_of_the_device_is_restored(topology: Topology) -> None:
    state = progress.random_state()
    before = torch.rand(5, device="cuda").tolist()
    assert torch.rand(5, device="cuda").tolist() != before
    progress.restore_random_state([state], 0)
    assert torch.rand(5, device="cuda").tolist() == before


def test_the_hardware_is_read_from_the_device() -> None:
    seen = hardware.__wrapped__()  # not what an earlier test has looked at
    assert seen == hardware() and seen.cuda and seen.capability == (9, 0)
    assert seen.memory_bytes == torch.cuda.get_device_properties(0).total_memory


def test_the_cuda_version_of_torch_is_read_without_importing_it() -> None:
    assert doctor._built_for() == torch.version.cuda


def test_a_c_library_that_servers_cannot_load_is_a_fault_on_a_gpu_alone() -> None:
    (finding,) = doctor._glibc("2.28")
    assert finding.level == "FAIL" and "2.34" in finding.found
    assert not list(doctor._glibc("2.34"))


def test_nccl_is_compared_with_that_of_attached_servers() -> None:
    with fake_servers(1) as (url,):
        settings = ("rollout.engine=sglang", f"sglang.urls=[{url}]", "sglang.sync_method=broadcast")
        *_, last = doctor.servers(override(Config(), settings))
    assert "NCCL" in last.what


def test_the_kit_without_transformer_engine_measures_torchs_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert seen_gpus() == torch.cuda.device_count() > 0
    monkeypatch.setattr(kernels, "hardware", Hardware)
    row = kernels._attention(8)
    assert row.what == "attention of 8 tokens (torch)" and float(row.measured) > 0
    assert "not measured" in str(kernels._layer(8).measured)


def test_a_reference_model_is_in_host_memory_while_servers_sample(
    topology: Topology, tmp_path: Path
) -> None:
    model = write_checkpoint(tmp_path / "model", tiny_config("qwen2"))
    policy = override(Config(), ["policy.offload_while_generating=true"]).policy
    reference = PolicyModel(str(model), policy, topology, 1.0)

    def held() -> set[str]:
        return {one.device.type for one in reference.chunks[0].parameters()}

    values = {name: tensor.cpu() for name, tensor in reference.weights()}
    for _ in range(2):
        with reference.on_device():
            assert held() == {"cuda"}
        assert held() == {"cpu"}
    with reference.on_device():
        assert all(tensor.cpu().equal(values[name]) for name, tensor in reference.weights())


def test_fp32_logits_are_one_product_of_bf16_inputs() -> None:
    hidden, weight = (torch.ones(n, 16, device="cuda", dtype=torch.bfloat16) for n in (8, 24))
    tile = tile_of(torch.empty(8 * 24, device="cuda"), hidden, weight)
    assert tile.shape == (8, 24) and tile.dtype == torch.float32
