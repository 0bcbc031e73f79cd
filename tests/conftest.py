"""Before torch is imported anywhere: what computes at the same time shares the cores.

Idle OpenMP threads must not spin, and those of all processes that test add up to the cores.
"""

import os

from pilotfish.cores import usable_cores

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    share = usable_cores() // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))
