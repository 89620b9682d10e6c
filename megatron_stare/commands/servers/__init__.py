"""Processes that stand beside a run: rollout servers, and mirrors of the weights for them."""
