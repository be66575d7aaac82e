"""Builds the requests of calls, and says how their answers are decoded."""
