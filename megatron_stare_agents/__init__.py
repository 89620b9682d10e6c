"""Hosts of agents: runs in the environment of an agent, and needs the standard library alone."""
