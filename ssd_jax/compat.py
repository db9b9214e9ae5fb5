"""Differences between supported JAX versions, in one place.

JAX is not imported before it is needed: one setting must be made before it starts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import sys
from collections.abc import Callable
from typing import Any

from ssd_jax.errors import InputError, SsdError

_OPTION = "--xla_cpu_experimental_ynn_fusion_type"
_PRODUCTS = f"{_OPTION}=LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
_WRONG_SUMS = ("0.10.2",)  # versions of jaxlib
_ROWS = 32_769  # fewer are summed rightly


def avoid_wrong_sums() -> None:
    """Where the library that XLA has for processors gives wrong sums, leaves it products alone.

    XLA's own products would do, too, but there a row's bits depend on how many are beside it. XLA
    reads the option when JAX starts; later this does nothing. What the user says of it holds.
    """
    from jaxlib.version import __version__ as version

    given = os.environ.get("XLA_FLAGS", "").strip()
    a_file = given and not given.startswith("-")  # of flags; they stay the user's
    if version not in _WRONG_SUMS or _OPTION in given or a_file or jax_has_started():
        return
    os.environ["XLA_FLAGS"] = f"{given} {_PRODUCTS}".strip()


def jax_has_started() -> bool:
    """Whether JAX has devices already, so that no setting changes them any more."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bridge.backends_are_initialized()


@functools.cache
def check_sums() -> None:
    """Sums, once in a process, what some versions of XLA sum wrongly on processors (jax issue
    39103).

    Raises:
      SsdError: this one does.
    """
    import jax
    import numpy as np

    if jax.default_backend() != "cpu":
        return

    @jax.jit
    @jax.vmap
    def squared(row: jax.Array) -> jax.Array:
        return jax.numpy.sum((jax.numpy.eye(3) @ row) ** 2)

    rows = np.zeros((_ROWS, 3), np.float32)
    rows[:, 0] = np.arange(_ROWS) % 1024  # with squares that float32 holds
    if not np.array_equal(squared(rows), rows[:, 0] ** 2):
        from jaxlib.version import __version__ as version

        raise SsdError(
            f"jaxlib {version} computes wrong sums on this processor (jax issue 39103): import "
            f"ssd_jax before JAX starts, or set XLA_FLAGS={_PRODUCTS} for the process, or "
            "use another jaxlib"
        )


def widths_can_agree(compute: str) -> bool:
    """Whether a product of this dtype may give a row the same bits at every number of rows.

    On processors XLA chooses kernels of float32 and int8 products by the number of rows from JAX
    0.11 on: a few rows in hundreds differ in their last bits (0.11.2, 0.12.0.1), too few to be
    found by a look at some. Those of bfloat16 do not, nor did any with 0.10.2.
    """
    import jax

    return jax.default_backend() != "cpu" or compute == "bfloat16" or jax.__version_info__ < (0, 11)


def maxima_one_by_one() -> bool:
    """Whether XLA takes the maximum of a row one number at a time, on processors before JAX 0.11:
    that takes longer than to sum exponentials (1 ns a number with 0.10.2; a fifth with 0.12)."""
    import jax

    return jax.default_backend() == "cpu" and jax.__version_info__ < (0, 11)


def require_whole_programs() -> None:
    """Refuses what compiles whole programs for chips that are not there.

    Raises:
      InputError: JAX is older than 0.12, whose compilers take kernels alone.
    """
    import jax

    if jax.__version_info__ < (0, 12):
        version = ".".join(map(str, sys.version_info[:2]))
        raise InputError(
            f"this needs JAX 0.12, so Python 3.12 or newer, and has JAX {jax.__version__} with "
            f"Python {version}; install ssd-jax[tpu] in a newer one"
        )


@dataclasses.dataclass(frozen=True)
class Job:
    """A started job of several processes of JAX.

    Attributes:
      address: of its coordinator, HOST:PORT.
      index, count: this process's number, and how many there are.
      put: gives all processes a text by its name.
      get: waits so many seconds for it.
    """

    address: str
    index: int
    count: int
    put: Callable[[str, str], None]
    get: Callable[[str, float], str]


def start_job(seconds: float, silence: float, **given: Any) -> Job:
    """Starts JAX in a job of several processes, before anything asks for devices.

    Args:
      seconds: to wait for the others.
      silence: seconds that a process may be silent.
      given: to `jax.distributed.initialize`, which finds out the rest.

    Raises:
      RuntimeError, ValueError: the job cannot start, or JAX has started already.
    """
    import jax
    from jax._src import distributed  # nothing public gives the texts, nor the address

    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM, and stays
    # Who is lost is found out and told by this package, before JAX ends everything.
    jax.distributed.initialize(
        **given,
        initialization_timeout=math.ceil(seconds),
        heartbeat_timeout_seconds=math.ceil(100 + 2 * silence),
        shutdown_timeout_seconds=math.ceil(silence),
    )
    state = distributed.global_state
    client, address = state.client, state.coordinator_address
    assert client is not None
    assert address is not None
    return Job(
        address=address,
        index=state.process_id,
        count=state.num_processes,
        put=client.key_value_set,
        get=lambda name, seconds: client.blocking_key_value_get(name, math.ceil(1e3 * seconds)),
    )


def leave_job() -> None:
    """Leaves the job of `start_job`, when all do; JAX goes on with the devices of this process."""
    import jax

    jax.distributed.shutdown()


def why_no_mosaic_gpu() -> str | None:
    """Why kernels of Mosaic GPU cannot be compiled, in one line, or None: their spelling is that of
    JAX 0.11."""
    import jax

    if jax.__version_info__ >= (0, 11):
        return None
    return f"it needs JAX 0.11, so Python 3.12 or newer, and this is JAX {jax.__version__}"
