"""What this processor has."""

import functools
from pathlib import Path


@functools.cache
def flags() -> frozenset[str]:
    """Names of its instructions and the like, as Linux for x86 lists them."""
    listing = Path("/proc/cpuinfo")
    return frozenset(listing.read_text().split() if listing.exists() else ())
