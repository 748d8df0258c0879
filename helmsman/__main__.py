"""``python -m helmsman`` is the command line."""

import sys

from helmsman.controller.cli import main

sys.exit(main())
