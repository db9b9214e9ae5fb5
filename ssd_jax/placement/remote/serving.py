"""The standalone worker: loads what engines want of its draft, once for all that want the same."""

from __future__ import annotations

import functools
import gc
import logging
import ssl
import threading
import weakref
from typing import TYPE_CHECKING, Any, cast

import msgspec

from ssd_jax.errors import InputError
from ssd_jax.placement.device_groups import DeviceGroups
from ssd_jax.placement.process.loading import load_sessions
from ssd_jax.placement.process.server import (
    FIRST_MESSAGE,
    HasLeft,
    LeftError,
    MakeSession,
    wanted_sessions,
)
from ssd_jax.placement.process.supervisor import WorkerResources
from ssd_jax.placement.visible import Devices, count_gpus
from ssd_jax.speculation.text_drafts import TEXT_DRAFTS
from ssd_jax.wire.address import Address
from ssd_jax.wire.draft_spec import DraftSpec
from ssd_jax.wire.refusals import Refusals
from ssd_jax.wire.sockets import listen
from ssd_jax.wire.stream import ServeStream, StreamServer

if TYPE_CHECKING:
    from ssd_jax.checkpoints.checkpoint import Checkpoint

MAX_MESSAGE = 2**26
"""Most bytes of a message."""
_ENGINE_SILENCE = 7.0  # seconds; then its seat is free for another
_POLL = 0.5  # seconds between two looks whether an engine still waits
_LOG = logging.getLogger(__name__)


class Drafts:
    """Drafts that engines want.

    One loads at a time. Each stays as long as an engine uses it, the last one until another is
    wanted.

    Args:
      resources: what they are loaded from, and with.
      engines: most engines at a time.
    """

    def __init__(self, resources: WorkerResources, engines: int) -> None:
        self._resources, self._engines = resources, engines
        self._lock = threading.Lock()
        self._loaded: weakref.WeakValueDictionary[bytes, MakeSession] = (
            weakref.WeakValueDictionary()
        )
        self._last: MakeSession | None = None

    def load(self, spec: DraftSpec, has_left: HasLeft = lambda: False) -> MakeSession:
        """Loads the draft that an engine wants, unless it is loaded.

        Args:
          has_left: as of `server.Load`.

        Raises:
          InputError: another draft is wanted, or more memory than an engine's share.
          LeftError: the engine has left while others' drafts were loaded.
        """
        key = msgspec.msgpack.encode(spec)
        sessions = self._loaded.get(key)  # waits for no other's
        if sessions is not None:
            self._last = sessions
            return sessions
        while not has_left():
            if self._lock.acquire(timeout=_POLL):
                break
        else:
            raise LeftError("an engine has left before its draft was loaded")
        try:
            sessions = self._loaded.get(key)
            if sessions is None:
                self._last = None
                gc.collect()
                _LOG.warning("loading for an engine: %s slots, context %s, k %s, %s branches",
                             spec.slots, spec.context, spec.k, spec.branches)  # fmt: skip
                copies = len(self._loaded) + 1
                sessions = load_sessions(
                    spec, self._resources, engines=self._engines, copies=copies
                )
                self._loaded[key] = sessions
            self._last = sessions
            return sessions
        finally:
            self._lock.release()


def serve(
    resources: WorkerResources,
    engines: int,
    address: Address,
    token: str,
    tls: ssl.SSLContext | None,
) -> StreamServer:
    """Starts a worker.

    Args:
      resources, engines: see `Drafts`.
      token: secret that engines must know.
      tls: its certificate; None is plain text.

    Raises:
      InputError: the address cannot be listened on.
    """
    refusals = Refusals()
    drafts = Drafts(resources, engines)
    answers = wanted_sessions(drafts.load, MAX_MESSAGE, refusals, engines, FIRST_MESSAGE)
    return server_at(address, answers, token, tls, size=MAX_MESSAGE, refusals=refusals)


def server_at(
    address: Address,
    answers: ServeStream,
    token: str,
    tls: ssl.SSLContext | None,
    *,
    size: int,
    refusals: Refusals,
) -> StreamServer:
    """A `StreamServer` at an address.

    Raises:
      InputError: the address cannot be listened on.
    """
    try:
        endpoint = listen(*address)
    except OSError:
        raise InputError(
            f"listen = {str(address)!r} cannot be listened on: it is no address of this host, or "
            "another program has the port"
        ) from None
    return StreamServer(answers, endpoint, token, size, refusals, silence=_ENGINE_SILENCE, tls=tls)


def devices_of(text: str | None) -> Devices | None:
    """Devices that `draft_devices` names, which JAX starts with; None if it names none.

    Raises:
      InputError: the text is not a list of devices, or this host has others.
    """
    groups = DeviceGroups.parse(None, text)
    if groups.draft is None:
        return None
    platform = groups.platform or ("gpu" if count_gpus() else None)
    if platform is None:
        import jax

        platform = jax.default_backend()
        if platform == "cpu":
            raise InputError(
                f"draft_devices = {text!r}: JAX has the processor alone on this host; give "
                f"cpu:{text} for parts of it"
            )
    devices = Devices(cast("Any", platform), groups.draft)
    devices.claim()
    devices.start()
    return devices


def worker_models(draft: str, target: str | None) -> tuple[str, str | None]:
    """Sources of a draft and of the target that it takes tensors from.

    The draft's is a path if it comes with the package, the target's is None if no tensors are
    taken. Reads headers.

    Raises:
      InputError: the draft cannot be served, or needs a target and has none.
    """
    from ssd_jax.checkpoints.drafts.shipped import draft_source
    from ssd_jax.checkpoints.drafts.source import takes_tensors
    from ssd_jax.checkpoints.opening import open_checkpoint
    from ssd_jax.checkpoints.sources import resolve

    @functools.cache
    def opened() -> Checkpoint:
        if target is None:
            raise InputError(f"draft = {draft!r} is one for a target; give --target")
        return open_checkpoint(target)

    if draft in TEXT_DRAFTS:
        raise InputError(
            f"draft = {draft!r} is no model and needs no worker: give it to the engine, with "
            "`mode='sd'`"
        )
    source = draft_source(draft, opened, TEXT_DRAFTS)
    needed = takes_tensors(resolve(source))
    open_checkpoint(source, target=opened() if needed else None)
    return source, target if needed else None
