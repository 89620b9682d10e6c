"""Our gated delta rule against flash-linear-attention's, in the trainers' own environment: its
functions in plain torch, and the arguments that Megatron-Core gives to its kernels.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.conftest import TRAINERS_PYTHON
from tests.paths import ROOT

pytestmark = pytest.mark.trainers

COMPARISON = """
import inspect, json
import torch
from fla.modules.convolution import causal_conv1d
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, naive
from megatron_stare.policy import runtime
runtime.prepare()
from megatron_stare.policy.cpu_layers.special_layers import gdn, provide_operations
from megatron_stare.policy.cpu_layers.delta_rule import gated_delta_rule

torch.manual_seed(0)
q, k, v = (torch.randn(1, 130, 2, width) for width in (16, 16, 24))
k = torch.nn.functional.normalize(k, dim=-1)
given = [q, k, v, -torch.rand(1, 130, 2), torch.rand(1, 130, 2)]
for each in given:
    each.requires_grad_()
q, k, v, g, beta = given
theirs, _ = naive.naive_chunk_gated_delta_rule(q, k, v, g=g, beta=beta)
ours, _ = gated_delta_rule(q, k, v, g, beta)
upstream = torch.randn_like(ours)
pairs = [(ours, theirs), *zip(*(torch.autograd.grad(o, given, upstream) for o in (ours, theirs)))]
found = {"differences": [float((one - other).norm() / other.norm()) for one, other in pairs]}

rest = dict.fromkeys(("initial_state", "output_final_state", "cu_seqlens"))
rule = inspect.signature(chunk_gated_delta_rule)
rule.bind(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=False, **rest)
taps = dict.fromkeys(("x", "weight", "bias", "activation"))
inspect.signature(causal_conv1d).bind(**taps, **rest)
for kernels in (True, False):  # ours stay once they were put there
    provide_operations(theirs=kernels)
    functions = (gdn.chunk_gated_delta_rule, gdn.causal_conv1d)
    found[f"with kernels: {kernels}"] = [each.__module__.split(".")[0] for each in functions]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = subprocess.run(
        [str(TRAINERS_PYTHON), "-c", COMPARISON],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_values_and_gradients_are_theirs(found: dict[str, Any]) -> None:
    assert len(found["differences"]) == 6 and max(found["differences"]) < 1e-5


def test_their_kernels_are_used_only_where_they_may_be(found: dict[str, Any]) -> None:
    assert found["with kernels: True"] == ["fla", "fla"]
    assert found["with kernels: False"] == ["megatron_stare", "megatron_stare"]
