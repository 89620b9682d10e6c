"""The variables that policy.deterministic sets before CUDA starts."""

from __future__ import annotations

import os

import pytest

from megatron_stare.config import PolicyConfig, UserError
from megatron_stare.config.environment import ONE_QUEUE, REPEATABLE, prepare_environment


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ONE_QUEUE[0], *REPEATABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_deterministic_runs_set_their_variables_and_others_set_none() -> None:
    prepare_environment(PolicyConfig())
    assert not {ONE_QUEUE[0], *REPEATABLE} & os.environ.keys()
    prepare_environment(PolicyConfig(deterministic=True, tensor_model_parallel_size=2))
    assert {name: os.environ[name] for name in REPEATABLE} == {
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "NCCL_ALGO": "Ring",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_a_users_value_stays_unless_it_contradicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    with pytest.raises(UserError, match="NCCL_ALGO=Tree contradicts policy"):
        prepare_environment(PolicyConfig(deterministic=True))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
