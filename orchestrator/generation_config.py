"""A model's generation_config.json: how its makers would sample where a request says nothing, and where it ends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pilotfish.errors import InvalidArgumentError

NAME = "generation_config.json"

_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""What the file calls fields, and what we do; those that vLLM takes as well."""

_INTEGERS = ("top_k", "max_new_tokens")


def sampling_defaults(folder: Path) -> Mapping[str, float | int]:
    """What the file says of sampling, by our names; empty if it says nothing, or there is none.

    As in vLLM ``do_sample`` does not count: a temperature that is given is meant.

    Args:
        folder: of the model.

    Raises:
        InvalidArgumentError: a value is no number; ranges are for ``admission`` to judge.
    """
    content = read_json(folder, NAME)
    given = {name: content[name] for name in _FIELDS if content.get(name) is not None}
    for name, value in given.items():
        wanted = (int,) if name in _INTEGERS else (int, float)
        if type(value) not in wanted:
            kind = "an integer" if name in _INTEGERS else "a number"
            raise InvalidArgumentError(f"{name} is {value!r}; it must be {kind}", name)
    return {_FIELDS[name]: value for name, value in given.items()}


def end_token_ids(folder: Path) -> frozenset[int]:
    """Tokens that end what the model writes: those of the generation config, or if it names none of config.json.

    Args:
        folder: of the model.

    Raises:
        InvalidArgumentError: an id is none.
    """
    for name in (NAME, "config.json"):
        value = read_json(folder, name).get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(type(token_id) is int for token_id in ids):
                known = "it must be a token id or a list of them"
                raise InvalidArgumentError(f"{folder / name}: eos_token_id is {value!r}; {known}")
            return frozenset(ids)
    return frozenset()


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object of a model folder; empty if the file is missing.

    Raises:
        InvalidArgumentError: it is none.
    """
    path = folder / name
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidArgumentError(f"{path} is not JSON ({error}); fetch the model again") from error
    if not isinstance(content, dict):
        raise InvalidArgumentError(f"{path} is not a JSON object; fetch the model again")
    return content
