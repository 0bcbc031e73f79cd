"""``python -m orchestrator``."""

import sys

from pilotfish.extras import require_or_exit
from pilotfish.logs import silence_grpc_core

require_or_exit("serve", "python -m orchestrator")
silence_grpc_core()

from orchestrator.server import main  # noqa: E402

main(sys.argv[1:])
