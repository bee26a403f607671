"""When a link is called slow: pure, with given times."""

from hypothesis import given
from hypothesis import strategies as st

from laminar.workers.relay.link_speed import COMPARED_BYTES, SLOW_FACTOR, WINDOW_S, WINDOWS, Fastest, LinkSpeed

FAST = 1e9


def fastest(bytes_per_s: float = FAST) -> Fastest:
    known = Fastest()
    known.saw(int(bytes_per_s * 10), 10.0)
    return known


def windows(speed: LinkSpeed, bytes_per_s: float, count: int) -> list[bool]:
    """What it says at the end of so many windows."""
    return [speed.sent(int(bytes_per_s * WINDOW_S), WINDOW_S) for _ in range(count)]


def test_a_link_that_carries_less_than_a_tenth_of_another_is_called_slow_once():
    speed = LinkSpeed(fastest())
    assert windows(speed, FAST / SLOW_FACTOR / 2, WINDOWS + 5) == [False] * (WINDOWS - 1) + [True] + [False] * 5


def test_a_link_that_is_only_some_times_slower_is_not():
    assert not any(windows(LinkSpeed(fastest()), FAST / SLOW_FACTOR * 1.5, 50))


def test_one_slow_window_between_others_is_forgiven():
    speed = LinkSpeed(fastest())
    for _ in range(20):
        assert not any(windows(speed, FAST / 100, WINDOWS - 1))
        assert not any(windows(speed, FAST / 2, 1))


def test_without_anything_to_compare_with_no_link_is_slow():
    assert not any(windows(LinkSpeed(Fastest()), 1e3, 50))


def test_what_fits_into_buffers_says_nothing_about_a_link():
    known = Fastest()
    known.saw(COMPARED_BYTES - 1, 1e-6)
    assert not any(windows(LinkSpeed(known), 1e6, 10))


def test_the_next_link_is_not_called_slow_for_being_like_the_one_before_but_it_is_after_a_fast_one():
    known = fastest()
    assert any(windows(LinkSpeed(known), FAST / 100, WINDOWS))
    assert not any(windows(LinkSpeed(known), FAST / 100, 10)), "this relay's own side is slow"
    windows(LinkSpeed(known), FAST, 1)
    assert any(windows(LinkSpeed(known), FAST / 100, WINDOWS))


@given(st.lists(st.tuples(st.integers(0, 1 << 24), st.floats(0.0, 1.0)), max_size=100), st.floats(1.0, 1e12))
def test_however_it_went_a_link_is_called_slow_once_at_most_and_not_within_two_windows(parts, reference):
    known = Fastest()
    known.settle_for(reference)
    speed, seconds = LinkSpeed(known), 0.0
    told = []
    for num_bytes, took in parts:
        seconds += took
        told.append(speed.sent(num_bytes, took))
        assert not told[-1] or seconds >= WINDOWS * WINDOW_S
    assert sum(told) <= 1
