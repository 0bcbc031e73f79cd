"""What ``pilotfish bench`` does: ask a server many things, and tell what that cost.

``load`` and ``experiment`` do the asking; ``prompts``, ``records``, ``summary``, ``report`` and ``tables`` are pure;
``svg``, ``plots`` and ``page`` draw. The load generator is one asyncio process that uses the SDK as any client would,
and shares the cores of the machine that it runs on.
"""
