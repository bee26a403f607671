"""When a silent peer is given up, by the clock of one who may stand still himself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.workers.transport.silence import LATE, LOOKS, STRETCH, Silence

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
