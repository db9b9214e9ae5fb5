"""Makes the samples of output anew that README and docs show: `python docs/samples.py`.

A sample is the code block behind a comment `<!-- sample: COMMAND -->`, or
`<!-- sample: COMMAND | from PATTERN -->` where it begins with the last line that the regular
expression matches. COMMAND runs in the repository's root, 80 columns wide, with this Python's
`ssd-jax`; run it on a quiet machine, for samples have figures of speed. What the demo drew becomes
docs/figures/trace.png, so that picture and sample are of one run.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from ssd_jax.system.cache_dir import cache_dir

ROOT = Path(__file__).parent.parent
_SAMPLE = re.compile(
    r"(<!-- sample: (?P<command>[^|\n]+?)(?: \| from (?P<start>.+?))? -->\n+```\w*\n)"
    r"(?P<shown>.*?)(\n```)",
    re.DOTALL,
)


def output(command: str, start: str | None) -> str:
    """What a command prints on standard output, from the last line that `start` matches."""
    words = shlex.split(command)
    if words[0] == "ssd-jax":
        words[:1] = [sys.executable, "-m", "ssd_jax"]
    environment = os.environ | {"COLUMNS": "80"}
    done = subprocess.run(words, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE)
    lines = [line.rstrip() for line in done.stdout.decode().splitlines()]
    if start is not None:
        first = max(place for place, line in enumerate(lines) if re.search(start, line))
        lines = lines[first:]
    return "\n".join(lines).strip("\n").replace(str(Path.home()), "~")


def renew(text: str) -> str:
    """A page with its samples made anew."""

    def made(sample: re.Match[str]) -> str:
        return sample[1] + output(sample["command"], sample["start"]) + sample[5]

    return _SAMPLE.sub(made, text)


def main() -> None:
    """Renews every page that has samples."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        if _SAMPLE.search(text):
            page.write_text(renew(text), encoding="utf-8")
    shutil.copy(cache_dir() / "demo-trace.png", ROOT / "docs" / "figures" / "trace.png")


if __name__ == "__main__":
    main()
