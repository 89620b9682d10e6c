"""Processes that a run uses: rollout servers, and relays of the weights for them."""
