"""A draft on another host, which here is another process: what it says, and what is refused."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from ssd_jax.cli.main import main
from ssd_jax.errors import InputError
from ssd_jax.placement.process import memory
from ssd_jax.placement.process.connection import Connection
from ssd_jax.placement.process.supervisor import WorkerResources
from ssd_jax.placement.remote import far_worker, serving
from tests.llm.runs import ids, outputs, requests
from tests.placement.hosts.processes import free_port
from tests.placement.process.script import HELLO
from tests.placement.remote.scripted import FAR
from tests.placement.remote.workers import (
    checkpoints,
    command,
    hits,
    listening,
    opened,
    secret,
    start,
    started,
)
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("steady_streams")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return checkpoints(tmp_path_factory.mktemp("remote"))


@pytest.fixture(scope="module")
def worker(root):
    with started(root, "--compile_cache=off") as worker:
        yield worker


@pytest.fixture(scope="module")
def llm(root, worker):
    with opened(root, worker.address) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm):
    return ids(outputs(llm, requests(llm, "coupled"), "ar"))


@pytest.mark.more
def test_text_of_a_remote_draft_equals_autoregressive_decoding(llm, expected):
    found = outputs(llm, requests(llm, "coupled"), "ssd")
    assert ids(found) == expected
    assert hits(found) > 0
    trips = [output.metrics["round_trip_ms"] for output in found if output.metrics["hit_rate"]]
    assert all(0 < trip < 60_000 for trip in trips)
    assert str(llm.placement) == f"draft_placement = remote: draft at {llm.placement.addresses[0]}"


@pytest.mark.more
def test_trees_of_a_remote_draft_say_what_decoding_token_by_token_says(root, worker):
    with opened(root, worker.address, tree_nodes=8) as llm:
        asked = requests(llm, "coupled")
        found = outputs(llm, asked, "ssd")
        assert ids(found) == ids(outputs(llm, asked, "ar"))
    assert hits(found) > 0
    assert sum(output.metrics["tree_rounds"] or 0 for output in found) > 8


@pytest.mark.more
def test_greedy_text_under_the_ratio_rule_equals_autoregressive_decoding(root, worker):
    with opened(root, worker.address, verify="ratio") as llm:
        asked = requests(llm, "ratio")
        greedy = [n for n, request in enumerate(asked) if request.params.temperature == 0]
        expected, found = outputs(llm, asked, "ar"), outputs(llm, asked, "ssd")
        assert [ids(found)[n] for n in greedy] == [ids(expected)[n] for n in greedy]
        assert hits(found) > 0


@pytest.mark.more
def test_engines_share_a_worker_and_none_waits_for_the_other(root, worker, llm, expected):
    """The second wants something else; both have hits while both run."""
    with opened(root, worker.address, k="2", slots=2) as other, ThreadPoolExecutor(2) as pool:
        asked = [(llm, requests(llm, "coupled")), (other, requests(other, "coupled"))]
        found = [pool.submit(outputs, *case, "ssd") for case in asked]
        for future in found:
            assert ids(future.result(300)) == expected
            assert hits(future.result()) > 0


@pytest.mark.more
def test_a_worker_that_is_gone_costs_speed_alone_and_is_found_again(root):
    worker = start(root, listen=f"127.0.0.1:{free_port()}")  # which it has a second time
    try:
        with opened(root, worker.address) as llm:
            expected = ids(outputs(llm, requests(llm, "coupled"), "ar"))
            engine = llm.engine_of("ssd")
            for request in requests(llm, "coupled"):
                engine.add(request)
            found = {}
            for step in range(10**6):
                if step == 6:
                    worker.process.kill()
                    worker.process.wait()
                for event in engine.step():
                    if event.output is not None:
                        found[event.prompt_index] = event.output
                if not engine.has_work:
                    break
            assert [found[n].token_ids for n in sorted(found)] == expected
            assert any("dead" in (output.metrics["miss_causes"] or ()) for output in found.values())
            worker = start(root, listen=worker.address)
            again = []

            def back():
                again[:] = outputs(llm, requests(llm, "coupled"), "ssd")
                assert ids(again) == expected
                return hits(again) > 0

            eventually(back)
    finally:
        worker.process.kill()
        worker.process.wait()


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_that_is_told_to_end_ends_and_leaves_no_socket(root, end):
    worker = start(root)
    worker.process.send_signal(end)
    assert worker.process.wait(30) == (0 if end == signal.SIGTERM else 130)
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", int(worker.port)))


HANGS = """
import sys, threading
from ssd_jax.cli.main import main
from ssd_jax.placement.remote import serving

def load(*_, **__):
    print("it hangs", file=sys.stderr, flush=True)
    threading.Event().wait()

serving.load_sessions = load
sys.exit(main())
"""


@pytest.mark.more
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_that_loads_for_ever_ends_when_it_is_told_to(root, end):
    _, _, _, *words = command("127.0.0.1:0", root, "--compile_cache=off")
    worker = listening([sys.executable, "-c", HANGS, *words])
    engine = Connection(worker.address, HELLO, "", Counter(), FAR)
    try:
        assert any("it hangs" in line for line in worker.process.stderr)
        worker.process.send_signal(end)
        assert worker.process.wait(30) == (0 if end == signal.SIGTERM else 130)
    finally:
        worker.process.kill()
        engine.close()


@pytest.mark.more
@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_an_engine_that_is_told_to_end_leaves_nothing_and_the_worker_serves_the_next(
    root, llm, worker, expected, tmp_path, end
):
    prompts, directory = tmp_path / "prompts.jsonl", tmp_path / "kept"
    prompts.write_text('{"prompt": "abc"}\n' * 99)
    directory.mkdir()
    words = (
        *("--mode=ssd", "--k=3", "--dtype=float32", "--context=320", "--slots=1", "--json"),
        *(f"--prompt_file={prompts}", "--max_tokens=300", "--ignore_eos"),
        *(f"--target={root / 'target'}", f"--draft={root / 'draft'}"),
    )
    engine = subprocess.Popen(
        [sys.executable, "-m", "ssd_jax", "generate", *words,
         f"--draft_placement=remote:{worker.address}"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(directory)}, start_new_session=True,
    )  # fmt: skip
    assert engine.stdout.readline(), engine.communicate()  # in the middle of the next text
    engine.send_signal(end)
    engine.communicate(timeout=60)
    assert engine.returncode in (128 + end, -end)
    with pytest.raises(ProcessLookupError):
        os.killpg(engine.pid, 0)
    assert list(directory.iterdir()) == []
    assert ids(outputs(llm, requests(llm, "coupled"), "ssd")) == expected


@pytest.mark.parametrize("other", ["other", "other weights"])
def test_another_draft_is_refused_in_words_at_once(root, worker, other):
    with pytest.raises(InputError, match=r"the draft worker at .* is another draft than the targ"):
        opened(root, worker.address, draft=str(root / other))


@pytest.mark.more
def test_more_engines_than_it_serves_are_refused(root):
    with started(root, "--engines=1") as worker, opened(root, worker.address) as llm:
        outputs(llm, requests(llm, "coupled")[:1], "ssd")
        with pytest.raises(InputError, match="serves 1 engines already, and no more"):
            opened(root, worker.address)


@pytest.mark.more
def test_a_need_of_more_than_the_share_is_refused_with_figures(root, llm, monkeypatch):
    wanted = llm.loaded.worker._settings.spec
    monkeypatch.setattr(memory, "memory_limit", lambda: (2**18, "this machine"))
    words = (
        r"4 slots of context = 320 with budget = 8 and k = 3 need \d+ MiB of .* 0 MiB for each "
        r"of 3 engines \(this machine: 0 MiB, weights 0 MiB\); lower one of them, or start it"
    )
    with pytest.raises(InputError, match=words):
        serving.Drafts(WorkerResources(source=str(root / "draft"), devices=None), 3).load(wanted)


@pytest.mark.more
def test_attention_that_the_worker_cannot_have_is_refused(root, llm):
    wanted = llm.loaded.worker._settings.spec
    assert wanted.attention == "auto"
    asked = msgspec.structs.replace(wanted, attention="pallas_tpu")
    with pytest.raises(InputError, match="'pallas_tpu' is not possible: it needs a TPU"):
        serving.Drafts(WorkerResources(source=str(root / "draft"), devices=None), 1).load(asked)


@pytest.mark.more
def test_a_worker_has_whatever_devices_its_jax_has(root, llm, monkeypatch):
    """What an engine asks for is of no platform."""
    loaded = []

    def load_sessions(_spec, resources, **_):
        loaded.append(resources)
        return lambda called: None

    monkeypatch.setattr(serving, "load_sessions", load_sessions)
    wanted = llm.loaded.worker._settings.spec
    serving.Drafts(WorkerResources(source=str(root / "draft"), devices=None), 1).load(wanted)
    assert loaded[0].devices is None


@pytest.mark.more
def test_a_remote_draft_may_have_several_devices(root, expected):
    with started(root, "--draft_devices=cpu:0-1") as worker, opened(root, worker.address) as llm:
        found = outputs(llm, requests(llm, "coupled"), "ssd")
        assert ids(found) == expected
        assert hits(found) > 0


@pytest.mark.more
def test_an_address_without_a_worker_is_reported_in_seconds(root, monkeypatch):
    """No attempt goes on: streams that are left open delay those of the next engine."""
    made, closed = [], []

    class Noted(Connection):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

        def close(self):
            super().close()
            closed.append(self)

    monkeypatch.setattr(far_worker, "Connection", Noted)
    monkeypatch.setattr(far_worker, "ANSWER_SECONDS", 1.0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = rf"answers at 127.0.0.1:{port} within .*--listen=HOST:{port}.* nc -vz 127.0.0.1 {port}"
    with pytest.raises(InputError, match=words):
        opened(root, f"127.0.0.1:{port}")
    assert len(made) > 1
    assert {*map(id, made)} == {*map(id, closed)}


@pytest.mark.more
def test_a_port_that_is_taken_is_refused(root, worker):
    found = subprocess.run(command(worker.address, root), capture_output=True, text=True)
    assert found.returncode == 2
    assert "cannot be listened on" in found.stderr


@pytest.mark.more
def test_a_token_is_needed_where_the_worker_has_one(root, tmp_path):
    right, wrong = secret(tmp_path / "a"), secret(tmp_path / "b", "f" * 32)
    with started(root, f"--token_file={right}") as worker:
        with opened(root, worker.address, draft_token_file=right) as llm:
            expected = ids(outputs(llm, requests(llm, "coupled")[:2], "ar"))
            assert ids(outputs(llm, requests(llm, "coupled")[:2], "ssd")) == expected
        for files in ({"draft_token_file": wrong}, {}):
            with pytest.raises(InputError, match="its token is another"):
                opened(root, worker.address, **files)


REFUSED = {
    "listen = 'here' is no address": ["--listen=here", "--draft=x"],
    "give --draft, as in": ["--listen=127.0.0.1:1"],
    "draft_devices = 'x' is not": ["--listen=127.0.0.1:1", "--draft=x", "--draft_devices=x"],
    "JAX has the processor alone on this host; give cpu:0-1": [
        *("--listen=127.0.0.1:1", "--draft=x", "--draft_devices=0-1"),
    ],
    "in place of cpu:99": ["--listen=127.0.0.1:1", "--draft=x", "--draft_devices=cpu:99"],
    "draft_cores = 4000: there is no core 4000": [
        *("--listen=127.0.0.1:1", "--draft=x", "--draft_cores=4000"),
    ],
    "engines = 0": ["--listen=127.0.0.1:1", "--draft=x", "--engines=0"],
    "without TLS anybody between could read and change what is sent; give tls_cert and tls_key": [
        "--listen=0.0.0.0:1",
        "--draft=x",
    ],
    "tls_cert and tls_key go together": ["--listen=127.0.0.1:1", "--draft=x", "--tls_cert=a"],
    "token_file = '/nowhere' cannot be read": [
        "--listen=127.0.0.1:1",
        "--draft=x",
        "--token_file=/nowhere",
    ],
}


@pytest.mark.parametrize("words", REFUSED)
def test_bad_flags_of_a_worker_are_refused(words, capsys):
    assert main(["draft-worker", *REFUSED[words]]) == 2
    assert words in capsys.readouterr().err


def test_a_token_that_others_can_read_or_guess_is_refused(tmp_path, capsys):
    for text, mode, words in (("0" * 32, 0o644, "chmod 600"), ("short", 0o600, "no secret of 16")):
        path = tmp_path / words[:5]
        path.write_text(text)
        path.chmod(mode)
        flags = ["--listen=127.0.0.1:1", "--draft=x", f"--token_file={path}"]
        assert main(["draft-worker", *flags]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        ("ngram", "is no model and needs no worker"),
        ("nowhere.gguf", "does not exist"),
        ("{root}", "is not a checkpoint"),
    ],
)
def test_a_draft_that_cannot_be_served_is_refused_before_the_worker_listens(
    tmp_path, capsys, draft, words
):
    flags = ["--listen=127.0.0.1:0", f"--draft={draft.format(root=tmp_path)}"]
    assert main(["draft-worker", *flags]) == 2
    stderr = capsys.readouterr().err
    assert words in stderr
    assert "serving" not in stderr


def test_only_a_draft_that_takes_tensors_has_its_target_opened(root, tmp_path):
    target_path = str(root / "draft")
    assert serving.worker_models(target_path, "nowhere") == (target_path, None)
    (tmp_path / "config.json").write_text('{"ssd_jax_draft": {}}')
    with pytest.raises(InputError, match="nowhere"):
        serving.worker_models(str(tmp_path), str(tmp_path / "nowhere"))


ENGINE = {
    "draft_placement: remote = 'nowhere' is no address": {"draft_placement": "remote:nowhere"},
    "draft_placement: remote = '' is no address": {"draft_placement": "remote"},
    "draft_placement = 'far' is unknown; one of .*remote:HOST:PORT": {"draft_placement": "far"},
    "without TLS anybody between .*; give draft_tls_ca": {
        "draft_placement": "remote:10.0.0.7:4711"
    },
    "give draft_token_file, a file with a secret .*, or draft_tls_cert": {
        "draft_placement": "remote:10.0.0.7:4711",
        "draft_tls_ca": "ca.pem",
    },
    "draft_token_file is for draft_placement = 'remote:HOST:PORT'": {
        "draft_placement": "process",
        "draft_token_file": "a",
    },
}


@pytest.mark.parametrize("words", ENGINE)
def test_bad_settings_of_an_engine_are_refused_before_anything_loads(words):
    from ssd_jax.config.config import Config

    with pytest.raises(InputError, match=words):
        Config(mode="ssd", draft="x", **ENGINE[words]).place_draft()


@pytest.mark.more
def test_threads_of_this_process_end_with_their_engines(root, worker):
    before = threading.active_count()
    with opened(root, worker.address) as llm:
        outputs(llm, requests(llm, "coupled")[:1], "ssd")
    eventually(lambda: threading.active_count() <= before + 1)
