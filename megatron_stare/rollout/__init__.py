"""Where trajectories come from: the engine protocol and its engines."""
