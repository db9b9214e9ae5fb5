"""`ssd-jax trace`: draws what `--trace` wrote."""

from __future__ import annotations

from collections.abc import Sequence

from ssd_jax.cli import settings
from ssd_jax.errors import InputError
from ssd_jax.system.paths import require_writable, user_path
from ssd_jax.tools.traces.picture import ROUNDS, WARM_UP, choose, draw, title, window
from ssd_jax.tools.traces.read import read_trace

_FLAGS: settings.FlagSpecs = {
    "output": "image file; default: FILE.png",
    "from": ("int", None, f"first round to draw; default: {WARM_UP} behind the last prefill"),
    "rounds": ("int", ROUNDS, "rounds to draw"),
    "engine": "engine to draw, such as 'ssd k=4'; default: the last one with its own draft",
}


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    options = settings.parse(settings.make_flags(_FLAGS), "trace", arguments, files=["FILE"])
    path = user_path(options["FILE"])
    if options["output"] == "":
        raise InputError("output is empty; give a file such as trace.png, or leave it out")
    output = user_path(options["output"] or f"{path}.png")
    settings.at_least(options, **{"from": 0, "rounds": 1})
    engine = choose(read_trace(path), options["engine"])
    rounds = window(engine, options["from"], options["rounds"])
    if not output.parent.is_dir():
        raise InputError(f"output = '{output}': there is no directory '{output.parent}'; make it")
    if output.is_dir():
        raise InputError(f"output = '{output}' is a directory; give a file such as trace.png")
    require_writable("output", output)
    draw(engine, rounds, output)
    print(title(engine, rounds))
    print(output)
    return 0
