"""The metrics of a request: names, which are part of the interface, types and meanings."""

from __future__ import annotations

from typing import Annotated, TypedDict, get_type_hints


class RequestMetrics(TypedDict):
    """Every key is there; one that does not apply is None.

    The text beside a key's type says what it is; docs/metrics.md has the same table. Counters cover
    committed tokens only, after stops. A look-up is a round whose outcome was looked up in the
    speculation cache.
    """

    mode: Annotated[
        str | None, "mode that ran: ar, sd or ssd; with `--mode=auto` that of most rounds"
    ]
    tokens_per_second: Annotated[float | None, "decoding speed, without the prefill"]
    ttft_ms: Annotated[float | None, "time to the first token"]
    itl_p50_ms: Annotated[float | None, "time between tokens: median"]
    itl_p95_ms: Annotated[float | None, "time between tokens: 95th percentile"]
    itl_p99_ms: Annotated[float | None, "time between tokens: 99th percentile"]
    acceptance_length: Annotated[
        float | None, "tokens committed per target forward, bonus included"
    ]
    acceptance_histogram: Annotated[
        list[int] | None, "rounds by the number of tokens that they committed, from 1"
    ]
    acceptance_by_position: Annotated[
        list[tuple[int, int]] | None, "(accepted, judged) by position in the proposal"
    ]
    draft_tokens: Annotated[
        int | None, "proposed tokens that were verified; of a tree those of its longest path"
    ]
    tree_rounds: Annotated[
        int | None, "rounds that verified a tree of proposed tokens; the others had chains"
    ]
    plain_rounds: Annotated[
        int | None, "rounds that did without the draft, since mode auto found that faster"
    ]
    acceptance_length_on_hit: Annotated[
        float | None, "`acceptance_length` where the proposal was a prepared branch"
    ]
    acceptance_length_on_miss: Annotated[float | None, "`acceptance_length` where it was not"]
    hit_rate: Annotated[float | None, "hits / look-ups, whatever the cause of a miss"]
    hit_rate_by_k: Annotated[
        list[tuple[int, int]] | None, "(hits, look-ups) by accepted tokens of the outcome"
    ]
    hit_rate_by_rank: Annotated[
        list[tuple[int, int]] | None,
        "(hits, look-ups) by rank of the bonus token, over the look-ups for whose k a branch of "
        "this rank was prepared",
    ]
    miss_causes: Annotated[dict[str, int] | None, "misses by cause: cold, miss, late, stale, dead"]
    wasted_draft_tokens: Annotated[
        int | None, "tokens of branches that did not become a proposal, as far as reported"
    ]
    round_ms: Annotated[float | None, "between commits"]
    verify_ms: Annotated[
        float | None,
        "from the dispatch of a verification, or from the reading of the previous outcome if that "
        "was later, until its own outcome was read. Null where the draft shares the target's "
        "device",
    ]
    verify_idle_ms: Annotated[
        float | None,
        "`verify_ms` over rounds in which the draft was idle (few rounds near the end of a text, "
        "and shorter ones; `bench` times the two separately)",
    ]
    batch_sizes: Annotated[
        list[tuple[int, int]] | None,
        "(slots, rounds) by the number of slots that a verification ran, see `--batch_sizes`; "
        "those of prompts do not count",
    ]
    step_ms: Annotated[float | None, "one draft forward of all branches"]
    hidden_draft_share: Annotated[
        float | None,
        "draft time beside target time / draft time: all work for the request's slot (prefill, "
        "promotion, branches, just-in-time drafts). The target counts as busy until its outcome "
        "is read, so a wait for q in between is hidden, too",
    ]
    hidden_draft_share_on_hit: Annotated[float | None, "the same for what led to hits"]
    bytes_per_round: Annotated[
        float | None,
        "messages to and from the worker, for all slots, without transport overhead",
    ]
    round_trip_ms: Annotated[
        float | None,
        "a message to the worker and back, the fastest lately, without the worker's time in "
        "between",
    ]
    exact: Annotated[
        str | None,
        "the guarantee that holds of `--exact`: bitwise, widest (bitwise, with every verification "
        "at the widest width) or distribution",
    ]
    replicated: Annotated[
        dict[str, list[str]] | None,
        "by role, the logical axes that every device holds whole since their number does not "
        "divide them",
    ]
    kv_pages: Annotated[
        int | None,
        "pages of keys and values that the request held, with `--kv_memory` or `--page_size`",
    ]
    cached_tokens: Annotated[
        int | None,
        "prompt tokens that were not run, because their keys and values were already in these "
        "pages (OpenAI's usage has the same name); 0 with `--prefix_caching=false`",
    ]
    preemptions: Annotated[
        int | None,
        "times that the request was preempted for lack of pages, with `--kv_memory` and without "
        "bitwise exactness: its text is run again when pages are free. Often above 0: raise "
        "`--kv_memory`, or lower `--slots`",
    ]


REQUEST_KEYS = tuple(RequestMetrics.__annotations__)


def meanings() -> dict[str, str]:
    """What each key is, in Markdown."""
    hints = get_type_hints(RequestMetrics, include_extras=True)
    return {key: hint.__metadata__[0] for key, hint in hints.items()}
