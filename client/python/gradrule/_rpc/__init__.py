"""Implements the Python clients: connections, calls, streams and shared memory.

`async_client` is written by hand; `sync_client` is generated from it by `make client`.
"""
