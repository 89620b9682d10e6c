"""Exact mathematics on sharded tensors: torch only, process groups are arguments.

selection     the exact k largest, quantile, sum, mean, spread and extrema of values that live on
              many ranks
token_stats   surprisal, entropy and entropy sensitivity of every loss token from hidden states and
              a vocabulary shard
fused_loss    the same head with the loss and its gradient computed chunk by chunk in the forward
              pass
"""
