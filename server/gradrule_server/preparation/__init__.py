"""Reads graphs of callers: checks, expands, resolves overrides. Runs in compile workers, never in the front end."""
