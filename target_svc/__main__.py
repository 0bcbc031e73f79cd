"""``python -m target_svc``."""

import sys

from pilotfish.logs import silence_grpc_core

silence_grpc_core()

from target_svc.server import main  # noqa: E402

main(sys.argv[1:])
