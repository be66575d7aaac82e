"""Implements `gradrule demo`: trains a binary network on handwritten digits through a server."""
