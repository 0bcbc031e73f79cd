"""One inference engine behind lines of JSON, so that engines of different environments can be asked in turns.

    python bench/peer_worker.py transformers --model FOLDER --dtype bfloat16 --threads 2

``bench/peers.py`` starts one such process for each row of its table, in the row's own environment: at the top this file
imports nothing but the standard library. It answers greedily and never stops at an end token.

    stdout  {"version": "transformers 5.24.0, torch 2.13.0"}                     or  {"error": "…"} and the end
    stdin   {"prompts": [[1, 42, …], …], "max_tokens": 64}                       asked all at once
    stdout  {"answers": [{"token_ids": [7, …], "times": [0.12, …]}, …]}

``times`` has for each token the seconds from the question to the token's arrival. The end of stdin ends the process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TextIO

_LOOKUP_TOKENS = 10  # candidates a step, as in Hugging Face's own measurements of prompt lookup
_MAX_LEN = 2048  # of prompt and answer together, where an engine wants to know


class Answer:
    """Tokens of one prompt and when each came, in seconds after the answer was made."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.times: list[float] = []
        self._started = time.perf_counter()

    def add(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids
        self.times += [time.perf_counter() - self._started] * len(token_ids)

    def as_json(self) -> dict[str, Any]:
        return {"token_ids": self.token_ids, "times": self.times}


class Engine(Protocol):
    """Answers prompts of token ids greedily."""

    version: str

    def answer(self, prompts: list[list[int]], max_tokens: int) -> list[Answer]: ...

    def close(self) -> None: ...


class Transformers:
    """Hugging Face ``generate``: plain, with prompt lookup, or with an assistant model."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(arguments.threads)
        dtype = getattr(torch, arguments.dtype)
        self._model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype)
        self._model.generation_config.eos_token_id = None  # goes on after the end token
        self._settings: dict[str, Any] = {}
        if arguments.lookup:
            self._settings["prompt_lookup_num_tokens"] = _LOOKUP_TOKENS
        if arguments.assistant_layers:
            layers = {"num_hidden_layers": arguments.assistant_layers}
            assistant = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype, **layers)
            assistant.generation_config.eos_token_id = None
            self._settings["assistant_model"] = assistant
        self.version = f"transformers {version('transformers')}, torch {version('torch')}"

    def answer(self, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
        import torch

        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        streamer = _Streamer([Answer() for _ in prompts])
        settings = {"max_new_tokens": max_tokens, "do_sample": False, "pad_token_id": 0, "streamer": streamer}
        self._model.generate(ids, attention_mask=mask, **settings, **self._settings)
        return streamer.answers

    def close(self) -> None: ...


class _Streamer:
    """What ``generate`` hands its tokens to: first the prompts, then the tokens of each step."""

    def __init__(self, answers: list[Answer]) -> None:
        self.answers = answers
        self._is_prompt = True

    def put(self, token_ids: Any) -> None:
        if not self._is_prompt:
            # [rows] of a plain step, [1, tokens] of an assisted one
            for answer, added in zip(self.answers, token_ids.reshape(len(self.answers), -1).tolist(), strict=True):
                answer.add(added)
        self._is_prompt = False

    def end(self) -> None: ...


class LlamaCpp:
    """llama-cpp-python on a GGUF file; it answers one prompt at a time."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from llama_cpp import Llama

        threads = {"n_threads": arguments.threads, "n_threads_batch": arguments.threads}
        self._model = Llama(str(arguments.model), n_ctx=_MAX_LEN, verbose=False, **threads)
        self.version = f"llama-cpp-python {version('llama-cpp-python')}"

    def answer(self, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
        (prompt,) = prompts
        answer = Answer()
        self._model.reset()  # it would keep the beginning that this prompt shares with the last
        for token in self._model.generate(prompt, temp=0.0, repeat_penalty=1.0):
            answer.add([token])
            if len(answer.token_ids) == max_tokens:
                break
        return [answer]

    def close(self) -> None: ...


class Vllm:
    """vLLM's engine in this process, without its prefix cache."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        cores = sorted(os.sched_getaffinity(0))[: arguments.threads]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        import vllm

        settings = {"dtype": arguments.dtype, "max_model_len": _MAX_LEN, "enable_prefix_caching": False}
        self._engine = vllm.LLM(str(arguments.model), **settings).llm_engine
        self.version = f"vllm {vllm.__version__}, torch {version('torch')}"

    def answer(self, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        answers = {str(index): Answer() for index in range(len(prompts))}
        for request_id, prompt in zip(answers, prompts, strict=True):
            self._engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                answer = answers[output.request_id]
                answer.add(output.outputs[0].token_ids[len(answer.token_ids) :])
        return list(answers.values())

    def close(self) -> None: ...


class Pilotfish:
    """``pilotfish up`` as a user starts it, asked through the SDK."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from pilotfish import AsyncClient
        from pilotfish.cli.children import die_with_parent

        flags = ["--target", str(arguments.model), *shlex.split(arguments.up), "--listen", "127.0.0.1:0"]
        self._server = subprocess.Popen(
            [sys.executable, "-m", "pilotfish", "up", *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent(),
        )
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        if not line.startswith("ready "):
            raise RuntimeError(f"`pilotfish up {shlex.join(flags)}` did not start")
        self._runner = asyncio.Runner()
        self._client = AsyncClient(line.split()[1])
        self.version = f"pilotfish {version('pilotfish')}, torch {version('torch')}"

    def answer(self, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
        return self._runner.run(self._answer(prompts, max_tokens))

    async def _answer(self, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
        from pilotfish import SamplingParams

        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)

        async def ask(prompt: list[int]) -> Answer:
            answer = Answer()
            async with self._client.stream(prompt, params) as stream:
                async for piece in stream:
                    answer.add(piece.token_ids)
            return answer

        return await asyncio.gather(*map(ask, prompts))

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()
        self._server.terminate()
        self._server.wait()


ENGINES: dict[str, Callable[[argparse.Namespace], Engine]] = {
    "transformers": Transformers,
    "llama.cpp": LlamaCpp,
    "vllm": Vllm,
    "pilotfish": Pilotfish,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder; for llama.cpp a GGUF file")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and activations (bfloat16)")
    parser.add_argument("--threads", type=int, required=True, help="threads, and cores that it may run on")
    parser.add_argument("--lookup", action="store_true", help="transformers: prompt lookup")
    parser.add_argument("--assistant-layers", type=int, help="transformers: the first N layers as assistant model")
    parser.add_argument("--up", default="", help="pilotfish: flags of `pilotfish up`")
    arguments = parser.parse_args()
    serve(ENGINES[arguments.engine], arguments, sys.stdin, _private_stdout())


def serve(make: Callable[[argparse.Namespace], Engine], arguments: Any, questions: TextIO, replies: TextIO) -> None:
    """Makes the engine on its cores and answers until the questions end."""

    def say(**reply: Any) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    try:
        engine = make(arguments)
    except Exception as error:
        say(error=f"{type(error).__name__}: {error}")
        raise
    say(version=engine.version)
    try:
        for line in questions:
            question = json.loads(line)
            answers = engine.answer(question["prompts"], question["max_tokens"])
            say(answers=[answer.as_json() for answer in answers])
    finally:
        engine.close()


def _private_stdout() -> TextIO:
    """Stdout for the replies alone; whatever a library prints goes to stderr."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


if __name__ == "__main__":
    main()
