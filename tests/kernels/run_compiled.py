"""Runs the tests of a handler that is compiled with flags of its own, which come first.

A process has a handler once, so other flags need another process.
"""

import sys

import pytest

from ssd_jax.kernels import handlers

if __name__ == "__main__":
    flags, *arguments = sys.argv[1:]
    handlers._FLAGS = (*handlers._FLAGS, *flags.split())
    sys.exit(pytest.main(["-q", *arguments]))
