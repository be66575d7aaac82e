"""Runs the command line: `python -m gradrule`."""

import sys

from gradrule.cli.main import main

sys.exit(main())
