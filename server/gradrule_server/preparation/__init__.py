"""Prepares programs: parses, checks and expands callers' graphs. Runs in compile workers, not in the front end."""
