"""``python -m draft_svc``."""

import sys

from draft_svc.server import main

main(sys.argv[1:])
