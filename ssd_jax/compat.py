"""Differences between supported JAX versions, in one place.

JAX is imported only when needed, because one setting must be made before it starts.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Callable
from typing import Any

from ssd_jax.errors import InputError

_OPTION = "--xla_cpu_experimental_ynn_fusion_type"
PRODUCTS = f"{_OPTION}=LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
_WRONG_SUMS = ("0.10.2",)  # versions of jaxlib


def avoid_wrong_sums() -> None:
    """Where XLA's library for processors gives wrong sums, restricts it to products.

    XLA's own products would also do, but there a row's bits depend on the number of rows. XLA reads
    the option when JAX starts; later this does nothing. A value that the user gives takes
    precedence.
    """
    from jaxlib.version import __version__ as version

    flags = os.environ.get("XLA_FLAGS", "").strip()
    in_file = flags and not flags.startswith("-")  # of flags, which is left as it is
    if version not in _WRONG_SUMS or _OPTION in flags or in_file or jax_has_started():
        return
    os.environ["XLA_FLAGS"] = f"{flags} {PRODUCTS}".strip()


def jax_has_started() -> bool:
    """Whether JAX has its devices already, so that settings no longer change them."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bridge.backends_are_initialized()


def widths_can_agree(compute: str) -> bool:
    """Whether a product of this dtype may give a row the same bits at every number of rows.

    From JAX 0.11 on, XLA on processors chooses kernels of float32 and int8 products by the number
    of rows: a few rows in hundreds differ in their last bits (0.11.2, 0.12.0.1), too few to be
    found by checking some. Products of bfloat16 do not differ, nor did any with 0.10.2.
    """
    import jax

    return jax.default_backend() != "cpu" or compute == "bfloat16" or jax.__version_info__ < (0, 11)


def maxima_one_by_one() -> bool:
    """Whether XLA takes the maximum of a row one number at a time: on processors before JAX 0.11.

    That takes longer than summing exponentials (1 ns a number with 0.10.2; a fifth with 0.12).
    """
    import jax

    return jax.default_backend() == "cpu" and jax.__version_info__ < (0, 11)


def keeps_int4() -> bool:
    """Whether arrays of int4 can be parameters of compiled programs.

    JAX 0.10.2 says of arrays that it puts on chosen devices that their numbers have bytes, and
    refuses them where a program takes half bytes.
    """
    import jax

    return jax.__version_info__ >= (0, 12)


def require_whole_programs() -> None:
    """Refuses to compile whole programs for absent chips if JAX cannot.

    Raises:
      InputError: JAX is older than 0.12; its compilers only take kernels.
    """
    import jax

    if jax.__version_info__ < (0, 12):
        version = ".".join(map(str, sys.version_info[:2]))
        raise InputError(
            f"this needs JAX 0.12, so Python 3.12 or newer, and has JAX {jax.__version__} with "
            f"Python {version}; in an environment of a newer Python, run pip install -e '.[tpu]' "
            "in a checkout of ssd_jax; compile = false says what fits without"
        )


@dataclasses.dataclass(frozen=True)
class Job:
    """A started JAX job of several processes.

    Attributes:
      address: of its coordinator, HOST:PORT.
      index, count: number of this process, and number of processes.
      put: gives all processes a text, by its name.
      get: waits for a text, by its name, for a number of seconds.
    """

    address: str
    index: int
    count: int
    put: Callable[[str, str], None]
    get: Callable[[str, float], str]


def start_job(seconds: float, silence: float, **options: Any) -> Job:
    """Starts JAX in a job of several processes, before anything asks for devices.

    Args:
      seconds: how long to wait for the other processes.
      silence: seconds that a process may be silent.
      given: arguments of `jax.distributed.initialize`, which finds out the rest.

    Raises:
      RuntimeError, ValueError: the job cannot start, or JAX has started already.
    """
    import jax
    from jax._src import distributed  # no public API gives the texts or the address

    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM, and stays
    # This package finds and reports lost processes, before JAX ends everything.
    jax.distributed.initialize(
        **options,
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
    """Leaves the job of `start_job`, when all do; JAX keeps the devices of this process."""
    import jax

    jax.distributed.shutdown()


def why_no_mosaic_gpu() -> str | None:
    """Why Mosaic GPU kernels cannot be compiled, in one line; None if they can.

    They are written for the API of JAX 0.11.
    """
    import jax

    if jax.__version_info__ >= (0, 11):
        return None
    return f"it needs JAX 0.11, so Python 3.12 or newer, and this is JAX {jax.__version__}"


def why_no_clusters() -> str | None:
    """Why Mosaic GPU kernels cannot have clusters whose blocks write to each other's shared memory,
    in one line; None if they can: in JAX 0.12."""
    import jax

    if jax.__version_info__ >= (0, 12):
        return None
    return f"it needs JAX 0.12, so Python 3.12 or newer, and this is JAX {jax.__version__}"


def kernels_are_interpreted() -> bool:
    """Whether kernels that are traced now run in an interpreter, by JAX's context manager."""
    from jax._src import config  # no public API says

    return config.pallas_tpu_interpret_mode_context_manager.value is not None
