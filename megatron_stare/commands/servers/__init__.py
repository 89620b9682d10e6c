"""Processes that stand beside a run: rollout servers, and relays of the weights for them."""
