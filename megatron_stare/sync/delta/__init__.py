"""Weights over a slow link: what changed since the last sync, to a relay near the servers."""
