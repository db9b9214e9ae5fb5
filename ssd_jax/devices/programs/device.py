"""Runs programs on a device; they may take their arguments' memory, so no error is recoverable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ssd_jax.errors import DeviceError


def run(program: Callable[..., Any], *arguments: Any) -> Any:
    """Dispatches a program.

    A caller that donates an argument stores the result at once. Rounds run in a thread of their
    own, which no interrupt reaches.

    Raises:
      DeviceError: the program cannot run.
    """
    try:
        return program(*arguments)
    except Exception as error:
        raise _device_error(error) from error


def begin_read(array: jax.Array) -> None:
    """Starts to copy an array that will be read; a processor's is where it is read (and the call
    would take it 100 microseconds)."""
    if next(iter(array.sharding.device_set)).platform != "cpu":
        array.copy_to_host_async()


def read(array: Any) -> np.ndarray:
    """Waits for an array.

    Raises:
      DeviceError: a program that it comes from has failed.
    """
    try:
        return np.asarray(array)
    except Exception as error:
        raise _device_error(error) from error


def _device_error(error: Exception) -> DeviceError:
    message = str(error).partition("\n")[0]
    return DeviceError(f"{type(error).__name__}: {message}")
