"""`ssd-jax draft-worker`: serves a draft to engines on other hosts."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence

from ssd_jax.cli import settings
from ssd_jax.config.settings import DEFAULT_TARGET
from ssd_jax.errors import InputError
from ssd_jax.system.cache_dir import StoreSettings
from ssd_jax.system.cores import Cores, pin, require_usable
from ssd_jax.wire.address import Address
from ssd_jax.wire.security import WORKER_SETTINGS, Files

_FLAGS: settings.FlagSpecs = {
    "listen": "address to listen on, such as 10.0.0.7:4711; 127.0.0.1 serves only this host, "
    "port 0 is any free port",
    "draft": "draft to serve: as in the other commands",
    "target": (
        "str",
        DEFAULT_TARGET,
        "target model, for a draft that takes tensors from it, such as default",
    ),
    "token_file": "file with a secret that engines must present",
    "tls_cert": "PEM file of this worker's certificate; turns TLS on",
    "tls_key": "PEM file of its private key",
    "tls_client_ca": "PEM file of CAs to verify engines, which then need a certificate",
    "engines": ("int", 4, "max engines at a time; each gets an equal share of memory"),
    "draft_devices": "local devices to shard the draft over, such as 0-3, gpu:0,1 or cpu:0-3; "
    "default: one",
    "draft_cores": "CPU cores to run on, such as 1 or 2-3; default: all",
    "compile_cache": settings.flag_of("compile_cache"),
    "compile_cache_secret": settings.flag_of("compile_cache_secret"),
}


def run(arguments: Sequence[str]) -> int:
    """Runs the command until an interrupt or SIGTERM, then ends the process."""
    options = settings.parse(settings.make_flags(_FLAGS), "draft-worker", arguments)
    for name in ("listen", "draft"):
        if not options[name]:
            raise InputError(
                f"give --{name}, as in ssd-jax draft-worker --listen=127.0.0.1:4711 --draft=default"
            )
    settings.at_least(options, engines=1)
    address = Address.parse(options["listen"], "listen", any_port=True)
    files = Files(*(options[name] for name in WORKER_SETTINGS))
    files.check(address, serves=True)
    token, tls = files.read_token(WORKER_SETTINGS.token), files.serving_context()
    cores = Cores.parse(None, options["draft_cores"]).draft
    if cores is not None:
        require_usable("draft_cores", cores)
        pin(cores)  # before JAX counts them

    from ssd_jax.placement.process.supervisor import WorkerResources
    from ssd_jax.placement.remote.serving import devices_of, serve, worker_models
    from ssd_jax.system.compile_cache import open_store
    from ssd_jax.system.leaving import leave

    store = open_store(StoreSettings(options["compile_cache"], options["compile_cache_secret"]))
    devices = devices_of(options["draft_devices"])
    draft, target = worker_models(options["draft"], options["target"])
    resources = WorkerResources(
        source=draft,
        target=target,
        store=None if store is None else store.settings,
        devices=devices,
    )
    server = serve(resources, options["engines"], address, token, tls)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    transport = "TLS" if tls is not None else "plain text, this host alone"
    print(
        f"serving {options['draft']} at {server.address} ({transport})", file=sys.stderr, flush=True
    )
    status = 0
    try:
        while not stop.wait(1.0):  # a signal that another thread receives wakes no plain wait
            pass
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server.stop()
    leave("", status)  # Python's own exit waits for threads, whatever they wait for
