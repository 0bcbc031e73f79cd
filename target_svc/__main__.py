"""``python -m target_svc``."""

import sys

from pilotfish.extras import require_or_exit
from pilotfish.logs import silence_grpc_core

require_or_exit("serve", "python -m target_svc")
silence_grpc_core()

from target_svc.server import main  # noqa: E402

main(sys.argv[1:])
