"""Logging and the environment variables of the package."""

from __future__ import annotations

import logging
import os

from . import _native

logger = logging.getLogger("native_kda")

_words = {word.strip() for word in os.environ.get("NATIVE_KDA_LOG", "").split(",")} - {""}
dispatch = "dispatch" in _words
execution = "exec" in _words

if dispatch or execution:
    # Asked for by variable, so that it must be seen where the program sets up no logging.
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        _handler = logging.StreamHandler()
        _handler.setFormatter(logging.Formatter("[native_kda] %(message)s"))
        logger.addHandler(_handler)
        logger.propagate = False

if _words - {"dispatch", "exec"}:  # logs are no reason to stop a program
    logger.warning(
        "environment variable NATIVE_KDA_LOG: found %s, expected dispatch, exec or both, separated "
        "by a comma; other words are ignored",
        sorted(_words),
    )

_said: set[str] = set()


def once(text: str) -> None:
    """Logs a warning the first time that it occurs."""
    if text not in _said:
        if len(_said) < 1000:
            _said.add(text)
        logger.warning(text)


def disabled(tracing: bool = False) -> bool:
    """NATIVE_KDA_DISABLE=1 sends every call to flash-linear-attention; 0 and "" do not.

    torch.compile can look into os.environ but not into the module, which is ten times as fast."""
    name = "NATIVE_KDA_DISABLE"
    value = (os.environ.get(name, "") if tracing else _native.environment(name)).strip()
    if value not in ("", "0", "1"):
        raise ValueError(f"environment variable {name}: found {value!r}, expected 0 or 1")
    return value == "1"


def chosen(tracing: bool = False) -> str:
    """What KDA_IMPL names, "" if nothing. It is an explicit choice: no call goes elsewhere then."""
    name = "KDA_IMPL"
    value = os.environ.get(name, "") if tracing else _native.environment(name)
    return value.strip(", ")


def insist(error: Exception) -> _native.UnsupportedError:
    """The error of a call that would go to flash-linear-attention, were KDA_IMPL not set."""
    name = "KDA_IMPL"
    return _native.UnsupportedError(
        f"{error}. Environment variable {name}={_native.environment(name)!r} is an explicit "
        f"choice, so that the call does not go to flash-linear-attention: unset {name} to let it"
    )
