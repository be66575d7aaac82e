"""Runs the command line: `python -m gradrule.cli`."""

import sys

from gradrule.cli.main import main

sys.exit(main())
