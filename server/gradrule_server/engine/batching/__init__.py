"""Runs several calls of one program as one (dynamic batching) where that is proven to change no answer."""
