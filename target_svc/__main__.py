"""``python -m target_svc``."""

import sys

from target_svc.server import main

main(sys.argv[1:])
