"""Streams between hosts: encrypted, and only for who is known."""

from __future__ import annotations

import contextlib
import subprocess

import pytest

trustme = pytest.importorskip("trustme")

from ssd_jax.errors import InputError  # noqa: E402
from ssd_jax.placement.remote import far_worker  # noqa: E402
from tests.llm.runs import ids, outputs, requests  # noqa: E402
from tests.placement.remote.wire import FAR, namespace  # noqa: E402
from tests.placement.remote.workers import (  # noqa: E402
    checkpoints,
    hits,
    opened,
    secret,
    started,
)

pytestmark = pytest.mark.usefixtures("steady_streams")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return checkpoints(tmp_path_factory.mktemp("secure"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Paths: two authorities, a certificate of either end, a token."""
    path = tmp_path_factory.mktemp("files")
    found = {"token": secret(path / "token")}
    trusted, untrusted = trustme.CA(), trustme.CA()
    for name, authority in (("ca", trusted), ("other", untrusted)):
        authority.cert_pem.write_to_path(str(path / name))
        found[name] = str(path / name)
    for end, authority in (("worker", trusted), ("engine", trusted), ("stranger", untrusted)):
        made = authority.issue_cert("127.0.0.1", "localhost", FAR)
        made.private_key_pem.write_to_path(str(path / f"{end}.key"))
        made.cert_chain_pems[0].write_to_path(str(path / f"{end}.cert"))
        found |= {f"{end}.{kind}": str(path / f"{end}.{kind}") for kind in ("key", "cert")}
    return found


def speaks(root, address, **settings):
    with opened(root, address, **settings) as llm:
        asked = requests(llm, "coupled")[:3]
        found = outputs(llm, asked, "ssd")
        assert ids(found) == ids(outputs(llm, asked, "ar"))
        return hits(found) > 0


@contextlib.contextmanager
def impatient():
    """Refusals of TLS look like silence, which is waited for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(far_worker, "ANSWER_SECONDS", 2.0)
        yield


@pytest.mark.more
def test_an_engine_with_tls_and_the_token_is_served_and_others_are_not(root, files):
    flags = f"--tls_cert={files['worker.cert']}", f"--tls_key={files['worker.key']}"
    with started(root, *flags, f"--token_file={files['token']}") as worker:
        known = {"draft_tls_ca": files["ca"], "draft_token_file": files["token"]}
        assert speaks(root, worker.address, **known)
        refused = [
            ({"draft_token_file": files["token"]}, "no draft worker answers"),  # plain text
            (known | {"draft_tls_ca": files["other"]}, "no draft worker answers"),
            (known | {"draft_token_file": None}, "its token is another"),
        ]
        for settings, words in refused:
            with pytest.raises(InputError, match=words), impatient():
                opened(root, worker.address, **settings)
        assert speaks(root, worker.address, **known), "it stays up"


@pytest.mark.more
def test_with_certificates_of_both_ends_others_are_not_served(root, files):
    flags = f"--tls_cert={files['worker.cert']}", f"--tls_key={files['worker.key']}"
    with started(root, *flags, f"--tls_client_ca={files['ca']}") as worker:
        known = {"draft_tls_ca": files["ca"]}
        for end in ("stranger", None):
            pair = {}
            if end:
                pair = {f"draft_tls_{kind}": files[f"{end}.{kind}"] for kind in ("cert", "key")}
            with pytest.raises(InputError, match="no draft worker answers"), impatient():
                opened(root, worker.address, **known | pair)
        pair = {f"draft_tls_{kind}": files[f"engine.{kind}"] for kind in ("cert", "key")}
        assert speaks(root, worker.address, **known | pair)


@pytest.mark.slow
def test_tls_works_over_a_link_with_delay_and_loss(root, files):
    """5 ms each way, and one packet in a hundred lost."""
    certificate = f"--tls_cert={files['worker.cert']}", f"--tls_key={files['worker.key']}"
    known = {"draft_tls_ca": files["ca"], "draft_token_file": files["token"]}
    with contextlib.ExitStack() as ends:
        try:
            where = ends.enter_context(namespace(delay=0.005, loss=0.01))
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"a network namespace with a wire: {error}")
        flags = *certificate, f"--token_file={files['token']}"
        worker = ends.enter_context(started(root, *flags, listen=f"{FAR}:4711", where=where))
        llm = ends.enter_context(opened(root, worker.address, **known))
        asked = requests(llm, "coupled")
        expected = ids(outputs(llm, asked, "ar"))
        for _ in range(2):
            found = outputs(llm, requests(llm, "coupled"), "ssd")
            assert ids(found) == expected
            assert hits(found) > 0
            trips = [
                output.metrics["round_trip_ms"] for output in found if output.metrics["hit_rate"]
            ]
            assert min(trips) > 9
        figures = llm.loaded.worker.counters
        print(f"round trips {min(trips):.1f} to {max(trips):.1f} ms, {dict(figures)}")
        assert not figures["dead"]
