"""Multi-turn rollouts with tools."""
