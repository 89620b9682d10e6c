"""Rows of users' files -> Prompts, in a resumable order."""
