"""The command ``pilotfish``, one file per command; heavy imports wait until a command needs them."""
