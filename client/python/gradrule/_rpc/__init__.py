"""The Python client's calls.

`async_client` is written by hand; `sync_client` is generated from it by `make client`.
"""
