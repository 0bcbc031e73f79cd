"""The orchestrator: steps draft and target in lockstep; CPU only, no torch."""
