"""Limits, by means of the operating system, what an engine process may do."""
