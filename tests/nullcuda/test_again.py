"""Tests of the CPU, repeated on the device, where they enter other branches."""

# ruff: noqa: F401 (imported to be collected here)

from __future__ import annotations

import pytest

from tests.debug.test_doctor import test_the_environment_of_the_tests_is_ready
from tests.policy.test_tuning import test_impossible_switches_are_refused
from tests.rollout.sglang.test_process import (
    on_gpu,
    test_another_environments_python_is_named,
    test_another_version_of_nccl_is_reported,
    test_the_trainers_python_starts_servers_only_where_it_has_sglang,
)
from tests.rollout.sglang.test_server_launch import (
    test_a_speculating_server_drafts_one_chain,
    test_attached_servers_must_speculate_as_configured,
    test_servers_of_a_node_take_consecutive_gpus,
)
from tests.rollout.sglang.test_weights_checksums import (
    test_a_layers_experts_are_two_tensors_and_on_a_gpu_not_compared,
    test_a_mismatch_names_the_tensor,
)
from tests.sync.test_weight_sync import (
    test_a_failure_before_the_first_nccl_tensor_falls_back_to_gloo,
)
from tests.test_main import recipe, test_train_then_evaluate_then_report

pytestmark = pytest.mark.nullcuda
