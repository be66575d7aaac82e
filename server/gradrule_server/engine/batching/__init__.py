"""Runs several calls of one program as one (dynamic batching) where the program declares it."""
