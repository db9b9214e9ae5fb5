"""The status page, in a browser where there is one, and the figures that it shows."""

import os
import shutil
from collections import Counter

import pytest

from ssd_jax.engine.rounds.monitor import RoundCounts, TargetSpan
from ssd_jax.roles.activity import Busy
from ssd_jax.server.activity import EngineActivity
from ssd_jax.server.status import timeline
from tests.server.http_calls import call
from tests.server.scripted import ScriptedEngine, served
from tests.waiting import eventually

SPANS = [
    TargetSpan(1.000, 1.010, prompt=9, tokens=1),
    TargetSpan(1.010, 1.020, rows=2, tokens=5, proposed=6, accepted=3, hits=2, lookups=2),
    TargetSpan(1.020, 1.030, rows=2, tokens=3, proposed=6, accepted=1, hits=1, lookups=2),
    TargetSpan(1.030, 1.040, rows=2, tokens=2, proposed=6, lookups=2),
    TargetSpan(1.040, 1.050, rows=1, tokens=1, proposed=3, mode="sd"),
    TargetSpan(1.050, 1.060, rows=1, tokens=1),
]
WORK = [Busy("prefill", 0.5, 0.6), Busy("draft", 1.01, 1.012), Busy("grow", 1.012, 1.02, (), 1)]


def activity(**values):
    return EngineActivity(
        **{
            "mode": "ssd",
            "counts": RoundCounts(
                rounds=Counter({"ssd": 5}),
                tokens=13,
                misses=Counter({"late": 3}),
                draft_seconds=4.0,
                hidden_seconds=3.0,
            ),
            "running": 1,
            "used_pages": 3,
            "pages": 12,
            "target": SPANS,
            "draft": WORK,
            "now": 1.1,
            **values,
        }
    )


def test_the_figures_are_those_of_engines_and_queue():
    engine = ScriptedEngine()
    engine.seen = activity()
    with served(engine) as server:
        status, _, found = call(server.port, "GET", "/status.json")
    assert status == 200
    assert found["model"] == "m"
    assert (found["mode"], found["speculating"], found["why_not_speculating"]) == (
        "ssd",
        True,
        None,
    )
    assert (found["running"], found["slots"], found["waiting"], found["queue"]) == (1, 2, 0, 4)
    assert (found["tokens"], found["fallbacks"]) == (13, {"late": 3})
    assert (found["hit_rate"], found["hidden_draft_share"]) == (0.5, 0.75)
    assert found["memory"]["process"] > 1 << 20
    assert (found["memory"]["used_pages"], found["memory"]["pages"]) == (3, 12)


def test_a_server_that_loads_says_so():
    engine = ScriptedEngine()
    engine.seen = EngineActivity(mode=None)
    with served(engine, loaded=False) as server:
        found = call(server.port, "GET", "/status.json")[2]
    assert found["why_not_ready"] == found["why_not_speculating"] == "the model is loading"
    assert found["timeline"] == {"target": [], "draft": []}


def test_the_timeline_has_target_and_draft_in_milliseconds_before_now():
    found = timeline(activity())
    kinds = [kind for _, _, kind, _ in found["target"]]
    assert kinds == ["prompt", "hit", "mixed", "miss", "verify", "plain"]
    assert found["target"][1][:2] == (-90.0, -80.0)
    assert [span[2:] for span in found["draft"]] == [
        ("other", "draft", 0),
        ("forward", "grow", 1),
    ], "not the work long before"


def test_the_timeline_begins_behind_a_long_time_without_rounds():
    later = [span._replace(begin=span.begin + 5, end=span.end + 5) for span in SPANS]
    assert len(timeline(activity(target=[*SPANS, *later]))["target"]) == len(SPANS)
    assert len(timeline(activity(target=SPANS * 9))["target"]) == 16


def test_the_page_is_one_file_that_loads_nothing_from_elsewhere(server):
    status, headers, text = call(server.port, "GET", "/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in headers["content-security-policy"]
    outside = text.replace("http://www.w3.org/2000/svg", "")  # a name
    assert "://" not in outside
    assert "src=" not in outside


@pytest.fixture(scope="module")
def browser():
    """A Chromium without a window: `$CHROMIUM`, or one on PATH."""
    playwright = pytest.importorskip("playwright.sync_api")
    program = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if program is None:
        pytest.skip("there is no Chromium: set CHROMIUM to one")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser):
    """A page, which must not report errors."""
    page, errors = browser.new_page(), []
    page.set_default_timeout(20_000)
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    page.close()
    assert errors == []


def shows(page, selector, text):
    """Waits until an element of the page has a text."""
    eventually(lambda: page.inner_text(selector) == text)


@pytest.mark.browser
def test_a_browser_shows_the_figures_and_the_timeline(page):
    engine = ScriptedEngine()
    engine.seen = activity()
    with served(engine) as server:
        page.goto(f"http://127.0.0.1:{server.port}/")
        page.wait_for_selector("#lanes rect.hit")
        assert page.inner_text("#ready") == "ready"
        assert page.inner_text("#speculating") == "mode ssd · speculating as sd"
        assert page.inner_text("#running") == "1 of 2 slots"
        assert page.inner_text("#hits") == "50.0 %"
        assert page.inner_text("#pages") == "3 of 12"
        shown = {
            kind: page.locator(f"#lanes rect.{kind}").count()
            for kind in ("prompt", "hit", "mixed", "miss", "verify", "plain", "forward", "other")
        }
        assert set(shown.values()) == {1}, shown
        assert "draft 2" in page.text_content("#lanes")
        engine.seen = activity(counts=RoundCounts(tokens=5000))
        eventually(lambda: page.inner_text("#speed") not in ("–", "0"))
        engine.seen = activity(target=(), draft=())
        shows(page, "#speculating", "mode ssd · not speculating: nothing was decoded yet")
        server.state.draining = True
        shows(page, "#ready", "the server is about to end")


@pytest.mark.browser
def test_a_browser_asks_for_the_key_of_a_server_that_has_keys(page):
    with served(ScriptedEngine(), keys=("key-0123456789abcdef",)) as server:
        page.goto(f"http://127.0.0.1:{server.port}/")
        page.wait_for_selector("#key.asked")
        assert page.inner_text("#ready") == "an API key is needed"
        page.fill("#key input", "key-0123456789abcdef")
        page.click("#key button")
        shows(page, "#ready", "ready")
        assert not page.is_visible("#key")


@pytest.mark.browser
def test_a_browser_says_that_the_server_has_gone(page):
    with served(ScriptedEngine()) as server:
        page.goto(f"http://127.0.0.1:{server.port}/")
        shows(page, "#ready", "ready")
    shows(page, "#ready", "the server does not answer")
