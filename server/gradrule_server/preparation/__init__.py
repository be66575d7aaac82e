"""Prepares programs: reads callers' graphs, checks and expands them. Runs in compile workers, never in the front end."""
