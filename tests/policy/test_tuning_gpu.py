"""The properties of this GPU, read from the machine itself."""

from __future__ import annotations

import pytest

from megatron_stare.config import Config, UserError, override
from megatron_stare.policy.tuning import batch_invariance, hardware

pytestmark = pytest.mark.nullcuda


def test_batch_invariance_is_refused_with_what_is_missing_here() -> None:
    """The null device has no FlashAttention 3, and TransformerEngine where it was built."""
    here, policy = hardware(), override(Config(), ["policy.batch_invariant=true"]).policy
    assert here.cuda and not here.flash_attention_3
    missing = "FlashAttention 3" if here.has_transformer_engine else "a GPU and TransformerEngine"
    with pytest.raises(UserError, match=missing):
        batch_invariance(policy, here)
