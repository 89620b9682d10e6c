"""Adapters on a real server: the base is sent once and every version's adapters alone. Pinned
memory is a stand-in (tools/sglang_cpu/launch.py); loading, applying and refusing are SGLang's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_stare.config import Config, EngineError, UserError, override
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.adapters import AdaptedWeights, adapters_of
from megatron_stare.policy.conversion.convert import export_hf
from megatron_stare.policy.model import PolicyModel
from megatron_stare.policy.topology import Topology
from megatron_stare.reporting.logbook import read_metrics
from megatron_stare.rollout.engine import Request
from megatron_stare.rollout.sglang.server import check_modes
from megatron_stare.sync import weight_sync
from megatron_stare.sync.served_engine import ServedEngine
from megatron_stare.sync.tensors import by_value
from tests.rollout.sglang.world import (
    CHECKSUMS,
    PLAIN,
    TOLERANCE,
    VOCABULARY,
    assert_sampled_from,
    engine_for,
    make_model,
    requests,
)
from tests.small_run import small_config

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not CHECKSUMS, reason="this SGLang loads no adapters from tensors"),
]
ALONE = ("rollout.engine=sglang", "adapters.rank=4", "adapters.alpha=8", "adapters.merge=false")
# A server on a CPU pads other widths, and then its adapters do not fit.
WIDTH = {"intermediate_size": 192, "num_hidden_layers": 2}


@dataclasses.dataclass
class Served:
    """A model with adapters, and an engine with one launched server."""

    model: PolicyModel
    engine: ServedEngine
    directory: Path
    version: int = -1

    def step(self) -> None:
        """Change every B and send the next version."""
        self.version += 1
        dice = torch.Generator().manual_seed(self.version)
        for adapter in adapters_of(self.model.chunks):
            for second in adapter.lora_B.values():
                with torch.no_grad():
                    second.copy_(0.1 * torch.randn(second.shape, generator=dice))
        self.engine.load_weights(self.model.served_weights(), self.version)

    def sample(self, asked: list[Request]) -> None:
        """Ask the server; its log-probs are those of transformers with merged weights."""
        futures = self.engine.submit(asked, PLAIN)
        self.engine.wait(futures)
        merged = self.directory / f"merged_{self.version}"
        export_hf(self.model, Path(self.model.hf_checkpoint), merged)
        rollouts = [future.result() for future in futures]
        assert {rollout.weight_version for rollout in rollouts} == {self.version}
        assert_sampled_from(merged, asked, rollouts)

    def count(self, path: str) -> int:
        """The number of requests to `path` that the server answered with success."""
        log = (self.directory / "servers" / "sglang_0.log").read_text()
        return log.count(f'"POST /{path} HTTP/1.1" 200')


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("narrow") / "model", "qwen2", **WIDTH)


@contextlib.contextmanager
def serving(start: Path, directory: Path, place: Topology, *settings: str) -> Iterator[Served]:
    config = override(Config(), [f"policy.hf_checkpoint={start}", *ALONE, *settings])
    model = PolicyModel(str(start), config.policy, place, 1.0, config.adapters, seed=1)
    with contextlib.closing(engine_for(start, directory, place, *ALONE, *settings)) as engine:
        engine._started.result()  # tests ask the server too, in any order
        yield Served(model, engine, directory)


@pytest.fixture(scope="module")
def served(narrow: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    place = topologies.start(Config().policy)
    with serving(narrow, tmp_path_factory.mktemp("run"), place) as found:
        yield found
    topologies.stop()


def test_the_base_is_sent_once_and_adapters_with_every_version(served: Served) -> None:
    for _ in range(3):
        served.step()
        served.sample(requests(6, seed=served.version))
    assert served.count("update_weights_from_distributed") == served.count("weights_checker") == 1
    assert served.count("load_lora_adapter_from_tensors") == 3
    assert served.count("unload_lora_adapter") == 2
    counts = served.engine.counts()
    assert counts["sync_seconds_hash"] > 0 and counts["sync_seconds_send"] > 0


def test_scores_include_the_adapters(served: Served) -> None:
    """As the parity check reads: not of the base, which the server also holds."""
    served.step()
    pool, ids = served.engine.pool, numpy.arange(1, 30, dtype=numpy.int32)
    assert pool is not None
    (own,) = served.engine.prefill([ids])["sglang_0"]
    base = pool.run(pool.servers[0].client.prefill(ids, VOCABULARY, 30.0)).result()
    apart = {
        merged: numpy.abs(_logprobs(served.model, ids, merged=merged) - read.logprobs).max()
        for merged, read in ((True, own), (False, base))
    }
    assert max(apart.values()) < TOLERANCE, apart
    assert numpy.abs(own.logprobs - base.logprobs).max() > 100 * TOLERANCE


def _logprobs(model: PolicyModel, ids: numpy.ndarray, *, merged: bool) -> numpy.ndarray:
    """Log-probs of the ids after the first, by transformers."""
    weights = dict(dataclasses.replace(model.weights(), merged=merged))
    hf = AutoModelForCausalLM.from_pretrained(model.hf_checkpoint, dtype=torch.float32).eval()
    hf.load_state_dict(weights)
    sequence = torch.from_numpy(ids).long()[None]
    with torch.no_grad():
        found = torch.log_softmax(hf(sequence).logits[0, :-1], -1)
    return found.gather(1, sequence[0, 1:, None])[:, 0].numpy()


def test_a_server_that_lost_the_adapters_gets_everything_again(served: Served) -> None:
    """No request is answered by the base: the server refuses, and the request waits for weights."""
    served.step()
    pool, loads = served.engine.pool, served.count("load_lora_adapter_from_tensors")
    assert pool is not None
    syncs = served.count("weights_checker")
    body = {"lora_name": pool.tag}
    pool.run(pool.servers[0].client.call("POST", "/unload_lora_adapter", body)).result()
    served.sample(requests(2, seed=50))
    assert served.count("load_lora_adapter_from_tensors") == loads + 1
    assert served.count("weights_checker") == syncs + 1
    counts = served.engine.counts()
    assert counts["engine_fault_status"] + counts["engine_fault_garbage"] == 2, "one per request"


def test_a_killed_server_gets_base_and_adapters_again(served: Served) -> None:
    served.step()
    pool = served.engine.pool
    assert pool is not None and pool.servers[0].process is not None
    syncs = served.count("weights_checker")
    os.killpg(pool.servers[0].process.process.pid, signal.SIGKILL)
    served.sample(requests(4, seed=60))
    assert served.count("weights_checker") == syncs + 1
    assert served.engine.counts()["engine_restarts"] == 1


def test_adapters_that_arrive_wrong_are_refused(served: Served) -> None:
    """SGLang compares their checksums: the server ends, and a new one gets all of them again."""
    pool, sync = served.engine.pool, served.engine._sync
    assert pool is not None
    tensors = AdaptedWeights(served.model.weights(), served.model.adapters).adapters()
    wrong = [(name, each.clone()) for name, each in tensors]
    wrong[3][1].view(torch.int32)[0, 0].bitwise_xor_(1)
    digests = weight_sync.digest
    sums = iter([digests(weight_sync.bytes_of(each)) for _, each in tensors])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_sync, "digest", lambda content: next(sums))
        with pytest.raises(EngineError):
            sync.send_adapters(wrong, by_value(wrong), pool.servers)
    served.step()
    served.sample(requests(2, seed=70))


def test_a_server_without_adapters_is_refused_with_the_remedy(served: Served) -> None:
    pool = served.engine.pool
    assert pool is not None and pool.servers[0].info is not None
    info = pool.servers[0].info
    check_modes("url", info, pool.model, pool.settings)
    for wrong in ({"adapter_rank": 3}, {"adapter_targets": frozenset({"q_proj"})}):
        with pytest.raises(UserError, match=r"url does not serve .*--max-lora-rank 4 .* down_proj"):
            check_modes("url", dataclasses.replace(info, **wrong), pool.model, pool.settings)


def test_attention_of_a_model_with_experts_on_two_ranks(tmp_path: Path, topology: Topology) -> None:
    start = make_model(tmp_path / "model", "qwen3_moe", **WIDTH, mlp_only_layers=[])
    settings = ("adapters.targets=q,k,v,o", "sglang.gpus_per_server=2")
    with serving(start, tmp_path / "run", topology, *settings) as served:
        for _ in range(2):
            served.step()
            served.sample(requests(3, seed=served.version))
        assert served.count("weights_checker") == 1


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("sglang.colocated=true", "sglang.sync_method=tensor"),
        ("rollout.asynchrony=fully_async", "rollout.max_staleness=2"),
    ],
    ids=["own memory", "shared memory", "fully async"],
)
def test_a_run_trains_adapters_that_its_server_applies(
    more: tuple[str, ...], narrow: Path, tmp_path: Path, topology: Topology
) -> None:
    """A server that shares its memory with the trainer releases the base, and gets it again."""
    settings = (f"policy.hf_checkpoint={narrow}", *ALONE, *more)
    config = small_config(tmp_path, *settings, "sglang.sync_timeout=120", "optimizer.lr=1e-2")
    assert Trainer(config, topology).run(Interrupt())
    rows = read_metrics(Path(config.run.dir) / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["logprob_diff_max"] < TOLERANCE for row in rows if "logprob_diff_max" in row)
    assert not [key for row in rows for key in row if key.startswith("adapters/")]
    log = (Path(config.run.dir) / "servers" / "sglang_0.log").read_text()
    loads = log.count('"POST /load_lora_adapter_from_tensors')
    assert loads >= 3
    assert log.count('"POST /weights_checker') == (loads if config.sglang.colocated else 1)
