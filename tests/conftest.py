"""Before torch is imported anywhere: idle OpenMP threads must not spin, two models share the cores here."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
