"""Decodes answers of the server into results."""
