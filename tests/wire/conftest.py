"""Fixtures of the wire's tests."""

import pytest

from tests.wire.ends import certificates


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """See `certificates`."""
    return certificates(tmp_path_factory.mktemp("certificates"))
