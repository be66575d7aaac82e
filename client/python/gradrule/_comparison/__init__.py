"""Compares the gradients of a graph under several override maps."""
