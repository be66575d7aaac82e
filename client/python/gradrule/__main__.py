"""Runs the command line: `python -m gradrule`."""

import sys

from gradrule.cli.main import main

# Processes that the gateway starts import this module under another name.
if __name__ == "__main__":
    sys.exit(main())
