"""Weights over a slow link: what changed since the last sync, to a mirror beside the servers."""
