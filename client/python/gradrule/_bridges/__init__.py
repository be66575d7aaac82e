"""Calls programs from the functions of other frameworks."""
