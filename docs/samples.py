"""Makes the samples of output anew that README and docs show: `python docs/samples.py [PAGE ...]`.

A sample is the code block behind a comment `<!-- sample: COMMAND -->`, or
`<!-- sample: COMMAND | from PATTERN -->` where it begins with the last line that the regular
expression matches. COMMAND is for bash, in an empty directory, 80 columns wide; `ssd-jax` is this
Python's, and $ROOT the repository. A sentence below says when and where a sample was made; run
this on a quiet machine, for samples have figures of speed. Where a command fails its sample stays.
What the demo drew becomes docs/figures/trace.png, so that picture and sample are of one run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ssd_jax.system import environment
from ssd_jax.system.cache_dir import cache_dir

ROOT = Path(__file__).parent.parent
SAMPLE = re.compile(
    r"(<!-- sample: (?P<command>[^\n]+?)(?: \| from (?P<start>[^\n]+?))? -->\n+```\w*\n)"
    r"(?P<shown>.*?)\n```\n(?:\nMade on [^\n]*\n)?",
    re.DOTALL,
)


def output(command: str, start: str | None) -> str:
    """What a command prints on standard output, from the last line that `start` matches."""
    definition = f'ssd-jax() {{ "{sys.executable}" -m ssd_jax "$@"; }}; set -eo pipefail; {command}'
    variables = os.environ | {"COLUMNS": "80", "ROOT": str(ROOT), "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run(
            ["bash", "-c", definition], cwd=empty, env=variables, check=True, stdout=subprocess.PIPE
        )
    lines = [line.rstrip() for line in done.stdout.decode().splitlines()]
    if start is not None:
        first = max(place for place, line in enumerate(lines) if re.search(start, line))
        lines = lines[first:]
    return "\n".join(lines).strip("\n").replace(str(Path.home()), "~")


def renew(text: str, made: str) -> str:
    """A page with its samples made anew, each with the sentence `made` below it."""

    def again(sample: re.Match[str]) -> str:
        try:
            shown = output(sample["command"], sample["start"])
        except subprocess.CalledProcessError as error:
            print(f"left as it was: {sample['command']}: {error}", file=sys.stderr)
            return sample[0]
        return f"{sample[1]}{shown}\n```\n\n{made}\n"

    return SAMPLE.sub(again, text)


def main(names: list[str]) -> None:
    """Renews the pages of these names, or every page that has samples."""
    facts = environment.describe()  # before a page that changes
    made = f"Made on {facts['time'][:10]}: {environment.headline(facts)}."
    pages = [Path(name).resolve() for name in names]
    for page in pages or (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        renewed = renew(text, made)
        if renewed != text:
            page.write_text(renewed, encoding="utf-8")
            if "ssd-jax demo" in text:
                shutil.copy(cache_dir() / "demo-trace.png", ROOT / "docs" / "figures" / "trace.png")


if __name__ == "__main__":
    main(sys.argv[1:])
