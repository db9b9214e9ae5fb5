"""What is said of hosts is understood, or refused before anything starts."""

from __future__ import annotations

import dataclasses
import re
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from ssd_jax.config.config import Config
from ssd_jax.config.settings import AUTO_BUDGETS
from ssd_jax.errors import InputError
from ssd_jax.placement import placement
from ssd_jax.placement.hosts.flag import Hosts
from ssd_jax.placement.hosts.follower import Follower
from ssd_jax.placement.hosts.leader import Leader
from ssd_jax.placement.hosts.start import start
from tests.placement.hosts.paired import Texts
from tests.placement.hosts.processes import environment, free_port

HOSTS = "10.0.0.1:4000,count=2"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not understood"),
        ("10.0.0.1:4000", "is not understood"),
        ("10.0.0.1,count=2", "is not understood"),
        ("10.0.0.1:4000,count=2,count=3", "is not understood"),
        ("10.0.0.1:99999,count=2", "is not understood"),
        ("auto,count=2", "is not understood"),
        ("10.0.0.1:4000,count=2,index=2", "at most 1"),
        ("10.0.0.1:4000,count=0", "count is processes, 1 or more"),
        ("10.0.0.1:4000,count=2,stream=70000", "no port 70000"),
        ("10.0.0.1:4000,count=2,joining=0", "joining is seconds, 1 or more"),
        ("auto,joining=-1", "is not understood"),
    ],
)
def test_malformed_hosts_are_refused(text, words):
    with pytest.raises(InputError, match=words):
        Hosts.parse(text)


def test_hosts_are_parsed():
    assert Hosts.parse("auto,stream=5") == Hosts(None, stream=5)
    assert Hosts.parse("[::1]:4000,count=3,index=2") == Hosts("[::1]:4000", 3, 2)
    assert Hosts.parse("auto").jax_arguments == {}
    assert [Hosts.parse(text).joining for text in ("auto", "auto,joining=900")] == [300, 900]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "ssd", "draft": "d", "draft_placement": "inline"}, "use process"),
        ({"mode": "ssd", "draft": "d", "draft_placement": "submesh"}, "use process"),
        ({"host_timeout": 0.5}, "host_timeout = 0.5 is out of range"),
        ({"hosts": "auto,index=1"}, "is not understood"),
    ],
)
def test_settings_that_hosts_cannot_have_are_refused(settings, words):
    with pytest.raises(InputError, match=words):
        Config(**{"hosts": HOSTS, **settings})


@pytest.mark.parametrize(
    ("index", "follows", "words"),
    [(0, True, "process 0 of the job, the leader"), (1, False, "run ssd-jax follower here")],
)
def test_a_command_in_the_wrong_place_is_refused(index, follows, words):
    with pytest.raises(InputError, match=words):
        start(Hosts("127.0.0.1:1", 2, index), 30, follows=follows)


def test_a_port_that_others_have_is_refused():
    with socket.create_server(("", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        why = r"port .* cannot be listened at: Address already in use; give another port to all"
        with pytest.raises(InputError, match=why):
            start(Hosts(address, 2), 30, follows=False)


WAITED = r"waited 1 s; hosts=...,joining=SECONDS waits longer"


def test_a_leader_that_is_not_there_is_named():
    words = rf"nobody listens at 127.0.0.1:1 \(.* nc -vz 127.0.0.1 1 tells; {WAITED}"
    with pytest.raises(InputError, match=words):
        start(Hosts("127.0.0.1:1", 2, 1, joining=1), 30, follows=True)


def test_followers_that_do_not_come_are_named():
    words = rf"processes \[1, 2\] have not come to port \d+ of 127.0.0.1: .* {WAITED}"
    with pytest.raises(InputError, match=words):
        Leader(Texts().job(0, 3), Hosts("127.0.0.1:1", 3, joining=1), 30, leave=lambda *_: None)


def test_a_leader_that_says_nothing_is_waited_for_as_long():
    def get(_name, seconds):
        raise RuntimeError(f"nothing within {seconds}")

    job = dataclasses.replace(Texts().job(1), get=get)
    with pytest.raises(InputError, match=rf"where it listens: nothing within 1; {WAITED}"):
        Follower(job, Hosts("127.0.0.1:1", 2, 1, joining=1), 30)


@pytest.mark.more
def test_a_job_that_not_all_join_ends_in_the_time_that_was_given():
    command = [sys.executable, "-m", "ssd_jax", "generate", "--target=t", "--prompt=x"]
    hosts = f"--hosts=127.0.0.1:{free_port()},count=2,joining=1"
    ended = subprocess.run([*command, hosts], capture_output=True, text=True, env=environment())
    assert ended.returncode == 2
    message = r"not all processes have come to the job .* within 1 s; hosts=...,joining"
    assert re.search(message, ended.stderr)


def test_hosts_imply_a_draft_in_a_process():
    config = Config(hosts=HOSTS, mode="ssd", draft="d")
    assert config.placement_kind == "process"
    assert config.budgets_at("process") == AUTO_BUDGETS


def test_a_host_without_a_device_of_the_target_is_named():
    devices = [SimpleNamespace(process_index=index) for index in (0, 0, 1, 1, 2)]
    placement._check_hosts(devices, [0, 2, 4])
    with pytest.raises(InputError, match=r"host 1,2 has none of them.* are of hosts 0, 0, 1, 1, 2"):
        placement._check_hosts(devices, [0, 1])
