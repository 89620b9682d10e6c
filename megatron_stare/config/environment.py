"""Environment variables that a policy sets. Libraries read them when CUDA, or their first
communicator or handle, starts, so that this runs before; nothing large is imported here.
"""

from __future__ import annotations

import os
import shlex
import sys

from megatron_stare.config.errors import UserError
from megatron_stare.config.overrides import without_secrets
from megatron_stare.config.training import PolicyConfig

# One queue from host to GPU: a send launched before a matrix product starts before it and overlaps.
ONE_QUEUE = ("CUDA_DEVICE_MAX_CONNECTIONS", "1")
# Variables for bitwise repeatability, and valid values; the first is set. Sources: Megatron's
# and TransformerEngine's notes on determinism, cuBLAS's on reproducibility. NCCL's other algorithms
# (NVLS, trees) may add in another order in each call.
REPEATABLE = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
    "NCCL_ALGO": ("Ring", "ring"),
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
}


def own_command() -> str:
    """This process's command as it may be shown."""
    return shlex.join(["python", "-m", "megatron_stare", *without_secrets(sys.argv[1:])])


def quiet_libraries() -> None:
    """Silence warnings of tokenizers, and keep transformers from asking the network."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def prepare_environment(policy: PolicyConfig) -> None:
    """Set what `policy` needs; a user's value stays. UserError: it contradicts
    policy.deterministic=true.
    """
    if max(policy.tensor_model_parallel_size, policy.context_parallel_size) > 1:
        os.environ.setdefault(*ONE_QUEUE)
    if not policy.deterministic:
        return
    for name, values in REPEATABLE.items():
        given = os.environ.setdefault(name, values[0])
        if given not in values:
            raise UserError(
                f"{name}={given} contradicts policy.deterministic=true, which needs "
                f"{' or '.join(values)}; unset it, or set policy.deterministic=false"
            )
