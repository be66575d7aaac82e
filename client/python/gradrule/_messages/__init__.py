"""Builds the requests of calls and defines how their answers are decoded."""
