"""Compiles ``kernels/`` once per machine and loads it.

The compiler is the system's (``$CXX``, else c++, g++ or clang++), called without torch's headers, which takes
seconds instead of a minute; the result lies under ``$PILOTFISH_HOME`` (default ~/.cache/pilotfish) by a hash of
source, compiler and processor. Without a compiler the runtime goes on in plain torch, and says so.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import POINTER, c_float, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch

from pilotfish.errors import FailedPreconditionError

SOURCE = Path(__file__).parent / "kernels" / "kernels.cpp"
_FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-pthread", "-shared", "-fPIC")
_COMPILE_TIMEOUT_S = 300

log = logging.getLogger(__name__)


class Linear(ctypes.Structure):
    """``Linear`` of structs.h."""

    _fields_ = (
        ("kind", c_int64),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("weights", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
    )


class Part(ctypes.Structure):
    """``Part`` of structs.h."""

    _fields_ = (
        ("x", c_void_p),
        ("stride", c_int64),
        ("width", c_int64),
        ("norm", c_void_p),
    )


class Layer(ctypes.Structure):
    """``Layer`` of structs.h."""

    _fields_ = (
        ("has_beside", c_int64),
        ("beside_norm", c_void_p),
        ("attention_norm", c_void_p),
        ("qkv", Linear),
        ("output", Linear),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("gate_up", Linear),
        ("down", Linear),
    )


class Shape(ctypes.Structure):
    """``Shape`` of structs.h."""

    _fields_ = (
        ("hidden", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("page_size", c_int64),
        ("cache_kind", c_int64),
        ("eps", c_float),
    )


class Step(ctypes.Structure):
    """``Step`` of structs.h."""

    _fields_ = (
        ("tokens", c_int64),
        ("threads", c_int64),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("pages", c_void_p),
        ("first_pages", c_void_p),
        ("seen", c_void_p),
        ("ancestors", c_void_p),
        ("ancestor_bounds", c_void_p),
    )


FLOAT_KINDS = {torch.float32: 0, torch.bfloat16: 1}  # of a cache; `Kind` in structs.h

_PROTOTYPES = {
    "pilotfish_pack": (None, (c_int64, c_void_p, c_int64, c_int64, c_int64, c_void_p)),
    "pilotfish_linear": (
        None,
        (POINTER(Linear), POINTER(Part), c_int64, c_float, c_int64, c_int64, c_int64, c_void_p),
    ),
    "pilotfish_embed": (None, (POINTER(Linear), c_void_p, c_int64, c_void_p)),
    "pilotfish_attention": (None, (POINTER(Shape), POINTER(Step), c_void_p, c_void_p, c_void_p)),
    "pilotfish_layers": (
        None,
        (POINTER(Shape), POINTER(Layer), c_int64, POINTER(Step), c_void_p, c_void_p, c_void_p, c_int64),
    ),
}


def is_available() -> bool:
    """Whether the kernels can be had here; if not, the log says why, once."""
    try:
        library()
    except FailedPreconditionError as error:
        _warn_once(str(error))
        return False
    return True


@cache
def library() -> ctypes.CDLL:
    """The kernels.

    Raises:
        FailedPreconditionError: they cannot be compiled or loaded here.
    """
    try:
        loaded = ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        raise FailedPreconditionError(f"no native kernels: {said}") from error
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


@cache
def _warn_once(reason: str) -> None:
    log.warning("%s; models run in plain torch, which is several times slower", reason)


def _compiled() -> Path:
    """The shared library, compiled if it is not there yet.

    Raises:
        OSError: there is no compiler, or no place to write to.
        subprocess.SubprocessError: the compiler fails.
    """
    compiler = _compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    sources = (path.read_text(encoding="utf-8") for path in sorted(SOURCE.parent.iterdir()))
    parts = (*sources, version, _processor(), *_FLAGS)
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("PILOTFISH_HOME") or Path.home() / ".cache" / "pilotfish") / "native"
    path = folder / f"kernels-{digest}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:  # renamed when whole: others may compile the same
            built = Path(scratch) / path.name
            command = [compiler, *_FLAGS, str(SOURCE), "-o", str(built)]
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=_COMPILE_TIMEOUT_S)
            built.replace(path)
    return path


def _compiler() -> str:
    given = os.environ.get("CXX")
    for name in (given,) if given else ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return found
    raise FileNotFoundError(f"no C++ compiler ({given or 'c++, g++ or clang++'}); install one, such as Debian's g++")


def _processor() -> str:
    """What ``-march=native`` depends on: a library in a shared home must not run on a lesser machine."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    return platform.machine() + next((line for line in lines if line.startswith(("flags", "Features"))), "")
