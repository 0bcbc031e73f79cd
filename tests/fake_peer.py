"""A peer without a model, for tests of ``bench/peer_process.py``: it counts up from the last token of the prompt.

    python tests/fake_peer.py NAME SECONDS_PER_TOKEN DIARY [broken | dies | short]

The seconds are said, not spent. The diary, a file, gets a line for every question: name, prompts, tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    name, seconds, diary, *fault = sys.argv[1:]
    if "broken" in fault:
        print(json.dumps({"error": "ModuleNotFoundError: No module named 'fake'"}))
        return
    print(json.dumps({"version": f"fake {name}"}), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        prompts, count = question["prompts"], question["max_tokens"]
        with Path(diary).open("a", encoding="utf-8") as file:
            file.write(f"{name} {prompts} {count}\n")
        if "dies" in fault:
            sys.exit("out of fish")
        count -= "short" in fault
        times = [float(seconds) * (index + 1) for index in range(count)]
        answers = [{"token_ids": [prompt[-1] + i + 1 for i in range(count)], "times": times} for prompt in prompts]
        print(json.dumps({"answers": answers}), flush=True)


if __name__ == "__main__":
    main()
