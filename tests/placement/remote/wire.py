"""A network namespace behind a wire that delays and loses packets, for the superuser on Linux.

What `tc netem` does, which few kernels of test machines have: two TUN devices, one of them in the
namespace, and this process, which carries the packets between them.

    python -m tests.placement.remote.wire NAMESPACE DELAY LOSS
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

NEAR, FAR = "198.18.99.1", "198.18.99.2"
"""Addresses of the two ends, of the range that is set aside for tests of networks."""
_SET_NAME, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001


def main() -> None:
    """Carries packets until it is ended."""
    namespace, delay, loss = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    ends = [_tun(f"{namespace}{number}") for number in range(2)]
    _run("link", "set", f"{namespace}1", "netns", namespace)
    for prefix, number, near, other in (((), 0, NEAR, FAR), (("-n", namespace), 1, FAR, NEAR)):
        _run(*prefix, "addr", "add", near, "peer", other, "dev", f"{namespace}{number}")
        _run(*prefix, "link", "set", f"{namespace}{number}", "up")
    print("ready", flush=True)
    chance, waiting, number = random.Random(5), [], 0
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for end in select.select(ends, [], [], pause)[0]:
            packet, number = os.read(end, 2**16), number + 1
            if chance.random() < loss:
                continue
            heapq.heappush(waiting, (time.monotonic() + delay, number, end, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, end, packet = heapq.heappop(waiting)
            os.write(ends[1 - ends.index(end)], packet)


def _tun(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _SET_NAME, struct.pack("16sH", name.encode(), _TUN_WITHOUT_HEADER))
    return device


def _run(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def namespace(delay: float, loss: float) -> Iterator[tuple[str, ...]]:
    """A namespace whose wire has these seconds on each way, and loses this share of packets.

    Returns: what to begin a command with that is to run there.

    Raises:
      OSError, CalledProcessError: this machine does not let it be made.
    """
    name = f"wire{os.getpid() % 10000}"
    _run("netns", "add", name)
    try:
        carrier = subprocess.Popen(
            [sys.executable, "-m", "tests.placement.remote.wire", name, str(delay), str(loss)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert carrier.stdout is not None
            if carrier.stdout.readline() != "ready\n":
                raise OSError("no TUN device can be made")
            yield "ip", "netns", "exec", name
        finally:
            carrier.kill()
            carrier.communicate()
    finally:
        _run("netns", "del", name)


if __name__ == "__main__":
    main()
