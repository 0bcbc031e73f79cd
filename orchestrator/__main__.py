"""``python -m orchestrator``."""

import sys

from pilotfish.logs import silence_grpc_core

silence_grpc_core()

from orchestrator.server import main  # noqa: E402

main(sys.argv[1:])
