"""Drafts for SmolLM2, a folder each, named TARGET-WHAT; ``pilotfish up --draft NAME`` finds them by name."""
