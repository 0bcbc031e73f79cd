"""``python -m orchestrator``."""

import sys

from orchestrator.server import main

main(sys.argv[1:])
