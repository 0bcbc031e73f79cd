"""Bodies of the OpenAI-compatible endpoints.

Names and types are OpenAI's; what OpenAI lacks goes by vLLM's names, so that a client of either need not change.
Ranges are judged in ``orchestrator.admission``, the same for every protocol; here only what concerns HTTP alone.
"""
