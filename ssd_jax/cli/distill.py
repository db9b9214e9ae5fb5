"""`ssd-jax distill`: prompts, the target's own text, a trained draft, its figures."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ssd_jax.cli import settings
from ssd_jax.cli.loading import progress_bar
from ssd_jax.errors import InputError
from ssd_jax.system.paths import require_writable, user_path

STOPPED = 3
"""Exit status of a command that stopped early on request and can be continued."""

_STAGES = ("magpie", "prompts", "generate", "train", "evaluate")
_FLAGS: settings.FlagSpecs = {
    "config": "TOML configuration; configs/distill has examples",
    "out": "directory of the results; default: distill/NAME in the user's cache directory",
    "data": "directory of the prompt files; default: as in the configuration",
    "draft": "draft to evaluate: a draft checkpoint, another model source, or default for the one "
    "in the package; if not given, the trained draft",
    "stage": ("str", None, "stage to run alone (default: all unfinished ones)", _STAGES),
    "compile_cache": settings.flag_of("compile_cache"),
    "compile_cache_secret": settings.flag_of("compile_cache_secret"),
}


def run(arguments: Sequence[str]) -> int:
    """Runs the command.

    Returns: exit status; 0 if all is done, `STOPPED` if the same command has to be run again.
    """
    options = settings.parse(
        settings.make_flags(_FLAGS), "distill", arguments, config_of_flags=False
    )
    stage, draft = options["stage"], options["draft"]
    if stage not in (None, *_STAGES):
        raise InputError(f"stage = {stage!r} is unknown; one of {', '.join(_STAGES)}")

    from rich.console import Console

    from ssd_jax.system.cache_dir import StoreSettings, cache_dir
    from ssd_jax.system.compile_cache import open_store, use_store
    from ssd_jax.system.host_memory import keep_freed_memory
    from ssd_jax.system.sums import check_sums
    from ssd_jax.tools.distill.settings import read_settings
    from ssd_jax.tools.distill.stages import Stopped, run

    if not options["config"]:
        raise InputError("give --config=FILE, such as configs/distill/smollm2-light.toml")
    if draft is not None and stage not in (None, "evaluate"):
        raise InputError(
            f"draft = {draft!r} is for stage evaluate, and this is stage {stage}; leave it out"
        )
    data = None if options["data"] is None else user_path(options["data"])
    if data is not None and not data.is_dir():
        raise InputError(f"data = '{data}' is no directory; give that of the prompt files")
    configuration = read_settings(user_path(options["config"]), data=data)
    name = configuration.target.name or configuration.name
    work = cache_dir() / "distill" / name if options["out"] is None else user_path(options["out"])
    require_writable("out", work)
    use_store(open_store(StoreSettings(options["compile_cache"], options["compile_cache_secret"])))
    keep_freed_memory()
    check_sums()
    output = {"bar": progress_bar, "say": _say, "show": Console().print}
    try:
        run(configuration, work, stage=stage, draft=draft, **output)
    except Stopped as stopped:
        _say(f"stopped ({stopped}); the same command goes on with what is in {work}")
        return STOPPED
    except KeyboardInterrupt:
        _say(f"stopped; the same command goes on with what is in {work}")
        raise
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
