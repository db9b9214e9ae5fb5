"""`ssd-jax follower`: runs the target together with a leader, whose command has --hosts."""

from __future__ import annotations

from collections.abc import Sequence

from ssd_jax.cli import settings
from ssd_jax.config.config import Config
from ssd_jax.errors import InputError

_LOCAL_SETTINGS = ("hosts", "host_timeout", "target_cores", "compile_cache", "compile_cache_secret")
"""Settings that each process has for itself; all others are the leader's."""


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    values = settings.new_flags()
    used = (*_LOCAL_SETTINGS, "config")
    hidden = [name for name in values if name not in used]
    options = settings.parse(values, "follower", arguments, hidden=hidden)
    settings.require_used(values, "follower", used)
    local = {name: options[name] for name in _LOCAL_SETTINGS}
    config = Config(**local)
    if config.hosts is None:
        raise InputError(
            "follower needs hosts: the leader's, and which process this is, such as "
            "--hosts=10.0.0.1:4000,count=2,index=1"
        )
    from ssd_jax.llm.llm import LLM  # bad flags must not wait for JAX
    from ssd_jax.placement.hosts.follower import join
    from ssd_jax.system.leaving import leave

    leader = join(config.hosts, config.host_timeout)
    try:
        request = leader.settings()
        shared = {**request.config, **local, "trace": None, "draft_cores": None}
        llm = LLM(config=Config(**shared), ks=request.ks, others=leader)
        leader.follow(llm.loaded.roles, llm.loaded.load_extra)
    except BaseException as error:
        leader.fail(error)  # ends this process, too
    leave("", 0)
    return 0
