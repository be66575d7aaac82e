"""The command line `gradrule`."""
