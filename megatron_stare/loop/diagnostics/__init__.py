"""Causes of entropy's change in a step: predicted changes, tables of tokens, sampled rollouts."""
