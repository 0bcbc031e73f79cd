"""``python -m pilotfish`` is the command ``pilotfish``."""

from pilotfish.cli.main import app

app()
