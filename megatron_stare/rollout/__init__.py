"""Sources of trajectories: the engine protocol and its engines."""
