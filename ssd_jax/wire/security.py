"""Secrets and certificates of a stream between hosts."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NamedTuple

from ssd_jax.errors import InputError
from ssd_jax.system.paths import user_path
from ssd_jax.system.secret_files import read_secret
from ssd_jax.wire.address import Address


class Names(NamedTuple):
    """Names of the settings that give an end its `Files`."""

    token: str
    ca: str
    cert: str
    key: str


ENGINE_SETTINGS = Names("draft_token_file", "draft_tls_ca", "draft_tls_cert", "draft_tls_key")
WORKER_SETTINGS = Names("token_file", "tls_client_ca", "tls_cert", "tls_key")


class Files(NamedTuple):
    """Paths of files; None for none.

    Attributes:
      token: the secret that both ends have.
      ca: certificates trusted to sign the other end's certificate.
      cert, key: this end's certificate and its key.
    """

    token: str | None = None
    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def check(self, address: Address, *, serves: bool) -> None:
        """Refuses to send in plain text or to unknown peers.

        Args:
          serves: whether this end is the worker's.

        Raises:
          InputError: other hosts can reach the address, without TLS or without a token or
            certificates, or the files do not go together.
        """
        names = WORKER_SETTINGS if serves else ENGINE_SETTINGS
        if (self.cert is None) != (self.key is None):
            raise InputError(f"{names.cert} and {names.key} go together; give both or neither")
        required, flag = (self.cert, names.cert) if serves else (self.ca, names.ca)
        if required is None and (self.ca or self.cert):
            raise InputError(f"TLS needs {flag}; give it, or no certificates at all")
        if address.loopback:
            return
        if required is None:
            raise InputError(
                f"{address} is no address of this host alone, and without TLS anybody between "
                f"could read and change what is sent; give {flag}"
                + (f" and {names.key}" if serves else "")
            )
        peer_certificates = self.ca if serves else self.cert
        if self.token is None and peer_certificates is None:
            alternative = names.ca if serves else names.cert
            raise InputError(
                f"{address} can be reached by others; give {names.token}, a file with a secret "
                f"that both ends have, or {alternative}"
            )

    def read_token(self, name: str) -> str:
        """The secret; empty without a file.

        Raises:
          InputError: the file cannot be read, others can read it, or the secret is too short.
        """
        if self.token is None:
            return ""
        return read_secret(self.token, name)

    def engine_context(self) -> ssl.SSLContext | None:
        """Whom an engine trusts, and its certificate; None without TLS.

        Raises:
          InputError: a file cannot be read, or is none of PEM.
        """
        if self.ca is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._load(context, ENGINE_SETTINGS)
        return context

    def serving_context(self, names: Names = WORKER_SETTINGS) -> ssl.SSLContext | None:
        """A server's certificate; None without TLS. With a `ca`, clients need certificates.

        Raises:
          InputError: a file cannot be read, or is none of PEM.
        """
        if self.cert is None or self.key is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # no session is resumed
        if self.ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        self._load(context, names)
        return context

    def _load(self, context: ssl.SSLContext, names: Names) -> None:
        ca, cert, key = (
            None if path is None else _readable(path, name)
            for path, name in zip(self[1:], names[1:], strict=True)
        )
        failed = names.cert
        try:
            if cert is not None:
                context.load_cert_chain(cert, key, password=lambda: "")
            failed = names.ca
            if ca is not None:
                context.load_verify_locations(ca)
        except ssl.SSLError as error:
            raise InputError(
                f"{failed} = {getattr(self, 'cert' if failed == names.cert else 'ca')!r} does not "
                f"hold certificates in PEM, or {names.key} not their key: {error}"
            ) from None


def _readable(path: str, setting: str) -> Path:
    """The path of a file that can be read."""
    file = user_path(path)
    try:
        file.read_bytes()
    except OSError as error:
        raise InputError(f"{setting} = {path!r} cannot be read: {error.strerror}") from None
    return file
