"""How many pages slots share: memory as a size, or as a share of what there is."""

from __future__ import annotations

import jax
import pytest

from ssd_jax import LLM, Config, InputError
from ssd_jax.devices.opening.fit import Need
from ssd_jax.loading import memory
from ssd_jax.loading.memory import needs
from ssd_jax.loading.paging import most_pages

MACHINE = "this machine"


def needing(*memories, whose=MACHINE):
    """Needs of memories, each as (bytes in all, bytes beside pages, bytes of a page)."""

    def needed(paging):
        return [
            Need({"weights": rest, "keys and values": paging.total * page}, limit, whose)
            for limit, rest, page in memories
        ]

    return needed


@pytest.mark.parametrize(
    ("share", "memories", "groups", "pages"),
    [
        ("50%", [(200, 40, 10)], 1, 6),
        ("0.5", [(200, 40, 10)], 1, 6),
        (0.5, [(218, 40, 10)], 1, 6),
        ("auto", [(200, 100, 10)], 1, 8),
        ("100%", [(200, 100, 10)], 1, 10),
        ("50%", [(200, 40, 10), (60, 10, 5)], 1, 4),
        ("50%", [(200, 40, 10), (0, 0, 0)], 1, 6),
        ("50%", [(200, 40, 10)], 4, 4),
        ("50%", [(200, 120, 10)], 1, 0),
    ],
    ids=str,
)
def test_pages_fill_every_memory_up_to_the_share(share, memories, groups, pages):
    assert most_pages(Config(kv_memory=share), 64, groups, needing(*memories)) == pages


def test_memory_of_devices_that_do_not_report_it_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    config = Config(kv_memory="auto")
    with pytest.raises(InputError, match=r"kv_memory = auto: .* do not report .*; give a size"):
        most_pages(config, 64, 1, needing((200, 40, 10)))
    known = needing((200, 40, 10), whose="each device of the target")
    assert most_pages(config, 64, 1, known) == 14


@pytest.fixture(scope="module")
def settings(tiny_checkpoint):
    target = str(tiny_checkpoint)
    small = {"dtype": "float32", "context": 64, "slots": 6, "page_size": 64, "compile_cache": "off"}
    return {"target": target, "mode": "sd", "draft": target, "k": 2, "load": False, **small}


def needed(llm):
    (need,) = needs(llm.resolved, llm.resolved.engines)
    return need.total


def test_a_share_gives_no_more_pages_than_all_slots_can_fill(settings):
    assert LLM(**settings, kv_memory="auto").paging == (64, 6)


def test_pages_of_both_models_fit_the_share_and_one_more_does_not(settings, monkeypatch):
    limit = needed(LLM(**settings)) - 1  # of six pages
    monkeypatch.setattr(memory, "memory_limit", lambda: (limit, MACHINE))
    fitting = LLM(**settings, kv_memory="100%")
    assert fitting.paging == (64, 5)
    assert needed(fitting) <= limit


def test_a_share_without_room_for_one_sequence_is_refused(settings, monkeypatch):
    monkeypatch.setattr(memory, "memory_limit", lambda: (1000, MACHINE))
    message = r"kv_memory = 90% holds 0 pages of 64 positions, and a sequence of context = 64 needs"
    with pytest.raises(InputError, match=message):
        LLM(**settings, kv_memory="90%")


def test_a_size_without_room_for_one_sequence_is_refused_with_its_unit(settings):
    with pytest.raises(InputError, match=r"needs 1 \([\d.]+ KiB\); raise it, or lower `context`"):
        LLM(**settings, kv_memory="1KiB")


@pytest.mark.parametrize(
    ("text", "bytes_"), [(1000, 1000), ("1.5KiB", 1536), ("2 MiB", 2 << 20), ("1TiB", 1 << 40)]
)
def test_kv_memory_is_bytes_or_a_number_with_a_unit(text, bytes_):
    config = Config(kv_memory=text)
    assert (config.kv_bytes, config.kv_share) == (bytes_, None)


@pytest.mark.parametrize("text", ["1.5", "101%", "-5%", "much", "4GB", "90 %%", 2.0])
def test_kv_memory_that_is_neither_size_nor_share_is_refused(text):
    with pytest.raises(
        InputError, match=r"is not understood; give bytes, .* 4GiB, .* 90%, or auto"
    ):
        Config(kv_memory=text)
