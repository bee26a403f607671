"""When a silent peer is given up, by the clock of one who may stand still himself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.workers.transport.silence import LATE, LOOKS, STRETCH, Silence, Watch

LIMIT_S = 0.5
LOOK_S = Silence.look_s(LIMIT_S)


def looks(seconds: list[float]) -> list[bool]:
    silence = Silence(LIMIT_S)
    return [silence.looked(each) for each in seconds]


def test_a_peer_that_is_silent_for_the_limit_is_given_up():
    assert looks([LOOK_S * 1.01] * LOOKS) == [False] * (LOOKS - 1) + [True]
    assert pytest.approx(LIMIT_S) == LOOKS * LOOK_S


def test_the_time_in_which_this_process_stood_still_is_not_held_against_the_peer():
    assert looks([LOOK_S] * (LOOKS - 1) + [3 * LIMIT_S, LOOK_S]) == [False] * LOOKS + [True]


@given(st.lists(st.floats(LOOK_S, 10.0), min_size=100, max_size=100))
def test_every_wait_ends(seconds: list[float]):
    told = looks(seconds)
    first = told.index(True)
    assert sum(seconds[:first]) < STRETCH * LIMIT_S
    assert sum(each <= LATE * LOOK_S for each in seconds[:first]) < LOOKS


def polled(moments: list[float], moved_at: float = -1.0) -> list[bool]:
    """What a `Watch` says at these moments, asked in this order; something moved at one of them."""
    clock = iter([0.0, *(moment for moment in moments for _ in range(1 + (moment == moved_at)))])
    watch, told = Watch(LIMIT_S, lambda: next(clock)), []
    for moment in moments:
        if moment == moved_at:
            watch.moved()
        told.append(watch.is_over())
    return told


def every(seconds: float, begin: float, end: float) -> list[float]:
    return [begin + seconds * number for number in range(1, round((end - begin) / seconds) + 1)]


def test_one_who_polls_gives_a_silent_peer_up_after_the_limit():
    assert polled(every(0.02, 0.0, LIMIT_S + 0.1)).index(True) == pytest.approx(LIMIT_S / 0.02, abs=LOOKS)


def test_one_who_polls_begins_anew_when_something_moves():
    moments = every(0.02, 0.0, LIMIT_S + 0.2)
    assert not any(polled(moments, moved_at=moments[15]))


def test_the_time_in_which_one_who_polls_stood_still_is_not_held_against_the_peer():
    before, after = every(0.02, 0.0, 0.2), every(0.02, 1.5, 1.8 + LIMIT_S)
    told = polled([*before, *after])
    assert LIMIT_S - 2 * LOOK_S <= after[told.index(True) - len(before)] - 1.5 <= LIMIT_S
