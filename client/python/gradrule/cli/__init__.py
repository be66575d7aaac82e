"""Implements the command line `gradrule`."""
