"""Tests of rollout/: sandbox, tool calls, environments."""
