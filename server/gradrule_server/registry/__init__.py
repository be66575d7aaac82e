"""Stores rules and programs by name in SQLite, and blobs by their hash in files."""
