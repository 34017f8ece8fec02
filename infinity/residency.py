"""The states of a page and the only moves between them.

::

    ABSENT --FETCH--> FETCHING --FINISH--> CLEAN --MARK_DIRTY--> DIRTY --WRITE_BACK--> WRITING
      ^                  |                   |                     |                      |
      +------ FAIL ------+                   |                     |                      |
      +------ EVICT -------------------------+                     |                      |
      +------ DISCARD ---------------------------------------------+                      |
      +------ ALLOCATE --> DIRTY                  CLEAN <-- FINISH -----------------------+
                                                  DIRTY <-- FAIL -------------------------+
    ABSENT, CLEAN, DIRTY --CHAIN--> CHAINED --FINISH-----------> CLEAN    frame and backing agree
                                            --FINISH_UNWRITTEN-> DIRTY    only the frame has it

Who is trusted: ABSENT and FETCHING, the backing. CLEAN, both. DIRTY, the frame. WRITING, the frame (readable, not writable). CHAINED,
nobody but the queue, from submit to completion. A chain that fails has no move: its pages stay CHAINED and the engine is FAILED.

It knows nothing of frames, slots, tasks or policy; ``store.py`` is its only user (S1).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from infinity.errors import InvariantError


class PageState(IntEnum):
    """Where a page's content is, and who may touch it."""

    ABSENT = 0
    FETCHING = 1
    CLEAN = 2
    DIRTY = 3
    WRITING = 4
    CHAINED = 5


class PageEvent(IntEnum):
    """What can happen to a page."""

    FETCH = 0
    FINISH = 1
    FINISH_UNWRITTEN = 2
    FAIL = 3
    EVICT = 4
    DISCARD = 5
    ALLOCATE = 6
    MARK_DIRTY = 7
    WRITE_BACK = 8
    CHAIN = 9


TRANSITIONS: Mapping[tuple[PageState, PageEvent], PageState] = {
    (PageState.ABSENT, PageEvent.FETCH): PageState.FETCHING,
    (PageState.ABSENT, PageEvent.ALLOCATE): PageState.DIRTY,
    (PageState.ABSENT, PageEvent.CHAIN): PageState.CHAINED,
    (PageState.FETCHING, PageEvent.FINISH): PageState.CLEAN,
    (PageState.FETCHING, PageEvent.FAIL): PageState.ABSENT,
    (PageState.CLEAN, PageEvent.MARK_DIRTY): PageState.DIRTY,
    (PageState.CLEAN, PageEvent.EVICT): PageState.ABSENT,
    (PageState.CLEAN, PageEvent.CHAIN): PageState.CHAINED,
    (PageState.DIRTY, PageEvent.WRITE_BACK): PageState.WRITING,
    (PageState.DIRTY, PageEvent.DISCARD): PageState.ABSENT,
    (PageState.DIRTY, PageEvent.CHAIN): PageState.CHAINED,
    (PageState.WRITING, PageEvent.FINISH): PageState.CLEAN,
    (PageState.WRITING, PageEvent.FAIL): PageState.DIRTY,
    (PageState.CHAINED, PageEvent.FINISH): PageState.CLEAN,
    (PageState.CHAINED, PageEvent.FINISH_UNWRITTEN): PageState.DIRTY,
}
"""Every move there is; a pair that is not here is a fault of ours."""

_NEXT: tuple[tuple[PageState | None, ...], ...] = tuple(
    tuple(TRANSITIONS.get((state, event)) for event in PageEvent) for state in PageState
)


def step(state: PageState, event: PageEvent) -> PageState:
    """The state after ``event``.

    Errors: InvariantError where the table has no such move.
    """
    after = _NEXT[state][event]
    if after is None:
        raise InvariantError(f"a page that is {state.name} cannot {event.name}")
    return after
