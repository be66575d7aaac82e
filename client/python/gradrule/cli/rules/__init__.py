"""Implements `gradrule rules`: lists, runs, draws and checks rules."""
