"""Messages and stubs generated from ``protos/`` when the package is built or installed.

Nothing beside this file is in git. After editing a ``.proto`` run ``make protos``.
"""
