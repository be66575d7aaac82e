"""`python -m gradrule`: the command line."""

import sys

from gradrule.cli.main import main

sys.exit(main())
