"""What ``pilotfish check`` does: ask a deployment things whose answers are known, and judge what comes back.

A *check* is one file: an async generator that asks through the SDK, as any client would, and yields results. What
judges is pure: ``compare``, ``endings``, ``own_law``, ``heeding``, ``chi_square``, ``significance`` and ``audit``;
``results`` has the words, ``asking`` does the IO, ``checks`` is the list, ``run`` goes through it, and ``report``,
``plots`` and ``page`` show what was found. How much is asked follows from the time there is: ``rehearsal`` learns what
each check would ask, and ``pace`` shares the time out. ``laboratory`` asks the models of ``tiny_models``.
"""
