"""Builds graphs without TensorFlow, and defines rules and overrides."""
