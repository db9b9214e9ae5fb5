"""A process that mutates and reads one file after the other, and says of each how it went.

Arguments: the directory of clean files, one of its own. Each line of standard input is the JSON
[kind, seed]; each line of standard output is a `Case` of it.
"""

from __future__ import annotations

import json
import re
import resource
import shutil
import sys
import time
import traceback
from pathlib import Path

from ssd_jax.errors import InputError
from tests.fuzz.mutate import mutate
from tests.fuzz.readers import READERS


def main() -> None:
    """Answer until standard input ends."""
    clean, directory = Path(sys.argv[1]), Path(sys.argv[2])
    answers = sys.stdout
    sys.stdout = sys.stderr
    for kind, read in READERS.items():  # imports and caches are no part of a file's cost
        read(_copy(clean / kind, directory))
    growth = {
        kind: _measured(kind, _copy(clean / kind, directory))["megabytes"] for kind in READERS
    }
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        kind, seed = json.loads(line)
        path = _copy(clean / kind, directory)
        done = mutate(path, kind, seed)
        case = _measured(kind, path)
        case["megabytes"] = max(0.0, case["megabytes"] - growth[kind])
        print(json.dumps({"kind": kind, "seed": seed, "change": done, **case}), file=answers)
        answers.flush()


def _copy(source: Path, directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    return Path(shutil.copytree(source, directory))


def _measured(kind: str, path: Path) -> dict:
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    wall, cpu = time.monotonic(), _cpu()
    try:
        READERS[kind](path)
        outcome, words = "read", ""
    except InputError as error:
        outcome, words = "refused", str(error)
    except BaseException as error:  # a panic of a Rust library is no Exception
        outcome, words = "traceback", "".join(traceback.format_exception(error))[-3000:]
    return {
        "outcome": outcome,
        "words": words,
        "wall": time.monotonic() - wall,
        "cpu": _cpu() - cpu,
        "megabytes": _status("VmHWM") - before,
    }


def _status(name: str) -> float:
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"{name}:\s+(\d+) kB", text)
    assert found is not None
    return int(found[1]) / 1024


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


if __name__ == "__main__":
    main()
