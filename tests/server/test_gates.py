"""Keys, certificates, origins, and the limit of connections."""

import contextlib
import http.client
import json
import ssl

import pytest
import trustme

from ssd_jax.errors import InputError
from ssd_jax.server.options import check_access_log, check_origins, read_keys, read_tls
from tests.server.http_calls import call, raw
from tests.server.scripted import ScriptedEngine, served
from tests.waiting import eventually

COMPLETION = {"model": "m", "prompt": "hi", "max_tokens": 3}
KEYS = ("first-key-0123456789", "other-key-0123456789")


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def locked():
    """A server that asks for keys."""
    with served(ScriptedEngine(), keys=KEYS) as server:
        yield server


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens_all_paths(locked, key):
    assert call(locked.port, "POST", "/v1/completions", COMPLETION, bearer(key))[0] == 200
    assert call(locked.port, "GET", "/v1/models", headers=bearer(key))[0] == 200
    assert (
        call(locked.port, "GET", "/metrics", headers={"authorization": f"bearer {key}"})[0] == 200
    )


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer(""),
        bearer("first-key-012345678"),
        bearer("first-key-01234567890"),
        bearer(", ".join(KEYS)),
        {"Authorization": KEYS[0]},
        {"Authorization": f"Basic {KEYS[0]}"},
        {"Authorization": "Bearer \xff"},
    ],
)
def test_without_a_key_requests_get_401_as_openai_has_it(locked, headers):
    status, found, value = call(locked.port, "POST", "/v1/completions", COMPLETION, headers)
    assert (status, found["www-authenticate"]) == (401, "Bearer")
    assert value["error"]["code"] == "invalid_api_key"
    assert {*value["error"]} == {"message", "type", "param", "code"}
    for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/nowhere"):
        assert call(locked.port, "GET", path, headers=headers)[0] == 401


def test_probes_need_no_key(locked):
    for path in ("/health", "/health/live", "/health/ready"):
        assert call(locked.port, "GET", path)[0] == 200


def test_a_file_has_keys_one_a_line(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"{KEYS[0]}\n\n  {KEYS[1]}  \n")
    file.chmod(0o600)
    assert read_keys(str(file)) == KEYS
    assert read_keys(None) == ()


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        (KEYS[0], 0o644, "can be read by others; chmod 600 it"),
        (KEYS[0], 0o640, "can be read by others"),
        ("\n\n", 0o600, "has no secret"),
        (f"{KEYS[0]}\nshort", 0o600, "line 2: no secret of 16 to 1024"),
        ("two words of a key 0123456789", 0o600, "line 1: no secret of 16 to 1024"),
    ],
)
def test_a_bad_file_of_keys_is_refused_without_its_words(tmp_path, text, mode, message):
    file = tmp_path / "keys"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(InputError, match=message) as refused:
        read_keys(str(file))
    assert str(refused.value).startswith("api_key_file = ")
    assert "key-0" not in str(refused.value)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Files of a certificate, its key and its authority."""
    directory = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(directory / "cert.pem")
    issued.private_key_pem.write_to_path(directory / "key.pem")
    authority.cert_pem.write_to_path(directory / "ca.pem")
    return directory


def test_a_certificate_turns_tls_on(certificate):
    tls = read_tls(str(certificate / "cert.pem"), str(certificate / "key.pem"))
    trusting = ssl.create_default_context(cafile=certificate / "ca.pem")
    with served(ScriptedEngine(), tls=tls) as server:
        assert server.scheme == "https"
        connection = http.client.HTTPSConnection("127.0.0.1", server.port, context=trusting)
        connection.request("POST", "/v1/completions", json.dumps(COMPLETION))
        assert json.load(connection.getresponse())["choices"][0]["text"] == "aaa"
        connection.close()
        with pytest.raises((http.client.HTTPException, OSError)):
            call(server.port, "GET", "/health")
    assert read_tls(None, None) is None


def test_bad_certificates_are_named(certificate):
    cert, key, ca = (str(certificate / f"{name}.pem") for name in ("cert", "key", "ca"))
    with pytest.raises(InputError, match="ssl_certfile and ssl_keyfile go together"):
        read_tls(cert, None)
    with pytest.raises(InputError, match=r"ssl_certfile = .* or ssl_keyfile not their key"):
        read_tls(ca, key)
    with pytest.raises(InputError, match=r"ssl_keyfile = .* cannot be read"):
        read_tls(cert, str(certificate / "none.pem"))


def test_pages_of_allowed_origins_may_ask_and_see_errors():
    origin = "https://example.org"
    preflight = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    with served(ScriptedEngine(), origins=(origin,), keys=KEYS) as server:
        status, headers, _ = call(
            server.port, "OPTIONS", "/v1/completions", headers={"Origin": origin, **preflight}
        )
        assert (status, headers["access-control-allow-origin"]) == (200, origin)
        for key, expected in ((KEYS[0], 200), ("", 401)):
            status, headers, _ = call(
                server.port,
                "POST",
                "/v1/completions",
                COMPLETION,
                {"Origin": origin, **bearer(key)},
            )
            assert (status, headers["access-control-allow-origin"]) == (expected, origin)
        other = {"Origin": "https://example.com"}
        assert call(server.port, "OPTIONS", "/v1/models", headers={**other, **preflight})[0] == 400
        _, headers, _ = call(server.port, "GET", "/health", headers=other)
        assert headers["access-control-allow-origin"] is None


def test_without_allowed_origins_no_page_may_ask(server):
    _, headers, _ = call(server.port, "GET", "/health", headers={"Origin": "https://example.org"})
    assert headers["access-control-allow-origin"] is None


@pytest.mark.parametrize("origin", ["example.org", "https://example.org/path", "https://*.org", ""])
def test_what_no_browser_sends_is_no_origin(origin):
    with pytest.raises(InputError, match=r"is no origin; give such as https://example.org"):
        check_origins([origin])
    assert check_origins(["*", "http://localhost:3000"]) == ("*", "http://localhost:3000")


def test_further_connections_than_the_limit_get_503_and_probes_still_pass():
    with served(ScriptedEngine(), most_connections=3) as server, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(raw(server.port, b"")) for _ in range(3)]
        eventually(lambda: server.state.connections() == 3)
        status, headers, value = call(server.port, "POST", "/v1/completions", COMPLETION)
        assert (status, value["error"]["code"]) == (503, "too_many_connections")
        assert (headers["retry-after"], headers["connection"]) == ("1", "close")
        assert call(server.port, "GET", "/health")[0] == 200
        idle[0].close()
        eventually(lambda: server.state.connections() == 2)
        assert call(server.port, "POST", "/v1/completions", COMPLETION)[0] == 200


def test_an_access_log_must_be_writable(tmp_path):
    for path in (tmp_path, tmp_path / "none" / "log"):
        with pytest.raises(InputError, match=r"access_log = .* is no file in a directory"):
            check_access_log(str(path), logs_texts=False)
    with pytest.raises(InputError, match="access_log_texts is for an access log"):
        check_access_log(None, logs_texts=True)


def test_a_client_without_a_key_that_sends_much_sees_why(locked):
    """The limit of a body is that of the server; the connection is not reset before."""
    body = b" " * 3_000_000
    status, _, value = call(locked.port, "POST", "/v1/completions", body)
    assert (status, value["error"]["code"]) == (401, "invalid_api_key")
