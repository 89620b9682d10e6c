"""What a step says about entropy: predicted changes, tables of tokens, sampled rollouts."""
