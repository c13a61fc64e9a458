"""``python -m simple_offload.cli``: the command where its script is not on PATH."""

import sys

from simple_offload.cli.main import main

sys.exit(main())
