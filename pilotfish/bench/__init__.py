"""What ``pilotfish bench`` does: ask a server many things, and tell what that cost.

``load`` and ``experiment`` do the asking; ``prompts``, ``records``, ``summary``, ``report`` and ``tables`` are pure;
``svg``, ``plots``, ``render`` and ``page`` draw; ``origin`` says where a report comes from. The load generator is one
asyncio process that uses the SDK as any client would, and shares the cores of the machine that it runs on.
"""
