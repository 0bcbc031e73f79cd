"""The pure core: no IO, clock, asyncio, gRPC, logging or global randomness; numpy at most."""
