"""Implements the commands for operators beside `serve`, which run on the server's machine."""
