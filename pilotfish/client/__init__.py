"""The SDK behind ``from pilotfish import Client, AsyncClient, SamplingParams``.

``surface``, ``results``, ``params`` and ``failures`` are pure and shared; ``blocking`` and ``aio`` only move messages.
"""
