"""What the checks ask about: texts, so that any model has them, and of kinds on which drafts fare differently."""

from __future__ import annotations

STORY = "Once upon a time there was a small fish that swam ahead of the shark, and"
CODE = "def add(a, b):\n    return a + b\n\n\ndef multiply(a, b):\n"
COUNTING = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,"
LOOP = "serving " * 48
QUESTION = "The capital of France is"
PROMPTS = (STORY, CODE, COUNTING, LOOP, QUESTION)
