"""Profiles: how long a pair of models takes, as TOML files. Some are shipped, with the source of every number."""

from __future__ import annotations

import time
import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pilotfish.errors import InvalidArgumentError, NotFoundError

SHIPPED = Path(__file__).parent / "profiles"


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class Cost(_Table):
    """What one forward takes: the weights are read once however few tokens there are, until arithmetic takes longer."""

    weights_us: float = Field(ge=0)
    """Microseconds to read the weights, launches and all-reduces included: the least that a forward takes."""

    token_us: float = Field(ge=0)
    """Microseconds of arithmetic per token."""

    cached_ktoken_us: float = Field(0.0, ge=0)
    """Microseconds to read the K and V of a thousand cached tokens."""

    def forward_us(self, tokens: int, cached_tokens: int) -> float:
        """Microseconds of a forward of so many tokens over so many cached ones, all rows together.

        >>> Cost(weights_us=1000.0, token_us=10.0, cached_ktoken_us=20.0).forward_us(tokens=5, cached_tokens=3000)
        1060.0
        """
        return max(self.weights_us, tokens * self.token_us) + cached_tokens * self.cached_ktoken_us / 1000


class Profile(_Table):
    """Two models that do not exist, and how often they agree."""

    agreement: float = Field(ge=0, le=1)
    """Share of prefixes after which the draft's law is the target's; after the others they share no token."""

    target: Cost
    draft: Cost


def load_profile(name: str) -> Profile:
    """The shipped profile of that name, or the one in the TOML file at that path.

    Raises:
        NotFoundError: if there is neither.
        InvalidArgumentError: if the file is no profile; names the key at fault.
    """
    path = Path(name) if name.endswith(".toml") else SHIPPED / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in SHIPPED.glob("*.toml")))
        raise NotFoundError(f"simulate is {name!r}; shipped profiles are {known}; or give the path of a .toml file")
    try:
        return Profile.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
        raise InvalidArgumentError(f"{path} is no profile: {'; '.join(faults)}") from error
    except ValueError as error:
        raise InvalidArgumentError(f"{path} is not TOML: {error}") from error


def sleep_until(started: float, duration_us: float) -> None:
    """Sleeps for what is left of a step that began at ``time.perf_counter`` seconds ``started``."""
    time.sleep(max(0.0, started + duration_us / 1e6 - time.perf_counter()))
