from __future__ import annotations

import itertools

import pytest

from infinity.errors import InvariantError
from infinity.residency import TRANSITIONS, PageEvent, PageState, step

DRAWN = {
    "ABSENT": {"FETCH": "FETCHING", "ALLOCATE": "DIRTY", "CHAIN": "CHAINED"},
    "FETCHING": {"FINISH": "CLEAN", "FAIL": "ABSENT"},
    "CLEAN": {"MARK_DIRTY": "DIRTY", "EVICT": "ABSENT", "CHAIN": "CHAINED"},
    "DIRTY": {"WRITE_BACK": "WRITING", "DISCARD": "ABSENT", "CHAIN": "CHAINED"},
    "WRITING": {"FINISH": "CLEAN", "FAIL": "DIRTY"},
    "CHAINED": {"FINISH": "CLEAN", "FINISH_UNWRITTEN": "DIRTY"},
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(PageState, PageEvent)), ids=lambda member: member.name)
def test_a_step_is_what_is_drawn_and_nothing_else(state: PageState, event: PageEvent) -> None:
    after = DRAWN[state.name].get(event.name)
    if after is None:
        with pytest.raises(InvariantError, match=f"{state.name} cannot {event.name}"):
            step(state, event)
    else:
        assert step(state, event) is PageState[after]


def test_every_state_can_be_reached_and_left() -> None:
    assert set(TRANSITIONS.values()) == set(PageState)
    assert {before for before, _ in TRANSITIONS} == set(PageState)


def test_states_and_events_share_no_name() -> None:
    assert not set(PageState.__members__) & set(PageEvent.__members__)
