"""Errors that a user can act on. Each message says what is wrong, where, and what to do."""

from __future__ import annotations


class SsdError(Exception):
    """A failure the product explains; the command line prints it and exits with `exit_status`."""

    exit_status = 1


class InputError(SsdError):
    """Bad usage or input: a flag, a file, a checkpoint or a request that cannot be accepted."""

    exit_status = 2


class DeviceError(SsdError):
    """A program on a device failed. Its arguments are lost, so nothing can continue there."""
