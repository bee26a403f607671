"""Chunk sizes and rate limits of a link."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.workers.relay.manifest import BLOCK_BYTES
from laminar.workers.relay.pacing import BURST_S, CHUNK_BYTES_MAX, LinkCost, TokenBucket, best_chunk_bytes, chain_s

GIB = 1 << 30


@given(
    num_bytes=st.integers(BLOCK_BYTES, 200 * GIB),
    num_relays=st.integers(3, 1000),
    start_s=st.floats(1e-6, 1e-2),
    byte_s=st.floats(1e-11, 1e-6),
)
def test_no_other_chunk_size_would_be_faster_by_the_model(num_bytes, num_relays, start_s, byte_s):
    chosen = best_chunk_bytes(num_bytes, num_relays, start_s, byte_s)
    assert chosen % BLOCK_BYTES == 0
    assert BLOCK_BYTES <= chosen <= CHUNK_BYTES_MAX
    took = chain_s(num_bytes, num_relays, start_s, byte_s, chosen)
    for other in (chosen - BLOCK_BYTES, chosen + BLOCK_BYTES, chosen // 2 // BLOCK_BYTES * BLOCK_BYTES, chosen * 2):
        if BLOCK_BYTES <= other <= CHUNK_BYTES_MAX:
            assert took <= chain_s(num_bytes, num_relays, start_s, byte_s, other) * (1 + 1e-9)


def test_the_papers_72b_model_over_128_relays_would_take_larger_chunks_than_are_allowed():
    assert best_chunk_bytes(144 * 10**9, 128, 3.5e-3, 1 / 400e9) == CHUNK_BYTES_MAX


def test_a_cheap_start_makes_small_chunks_and_a_chain_of_two_large_ones():
    assert best_chunk_bytes(128 << 20, 8, 1e-5, 1e-8) == BLOCK_BYTES
    assert best_chunk_bytes(GIB, 2, 1e-5, 1e-8) == CHUNK_BYTES_MAX


def test_a_link_that_was_not_measured_or_a_chain_of_unknown_length_gets_single_blocks():
    cost = LinkCost()
    assert cost.best_chunk_bytes(GIB, 8) == BLOCK_BYTES
    cost.started([3e-3, 2e-3])
    cost.took(BLOCK_BYTES, 3e-3)
    assert cost.best_chunk_bytes(GIB, 0) == BLOCK_BYTES
    assert cost.best_chunk_bytes(GIB, 8) > BLOCK_BYTES


@given(rate=st.floats(1e3, 1e9), chunks=st.lists(st.integers(1, 10**8), min_size=1, max_size=50))
def test_what_goes_through_a_bucket_never_exceeds_its_rate_by_more_than_a_burst_and_a_chunk(rate, chunks):
    now = 0.0
    bucket = TokenBucket(rate, lambda: now)
    sent = 0
    for chunk in chunks:
        now += bucket.wait_s()
        assert bucket.wait_s() <= 1e-6 * (1 + now)
        assert sent <= rate * (now + BURST_S) * (1 + 1e-6) + 1
        bucket.spend(chunk)
        sent += chunk
    now += bucket.wait_s()
    assert now == pytest.approx(sent / rate, rel=1e-6, abs=1e-6)


def test_an_idle_link_saves_up_no_more_than_a_burst():
    now = 0.0
    bucket = TokenBucket(1000.0, lambda: now)
    now = 3600.0
    assert bucket.wait_s() == 0
    bucket.spend(1100)
    assert bucket.wait_s() == pytest.approx(1.0)


def test_no_limit_is_no_wait():
    bucket = TokenBucket(0.0)
    bucket.spend(1 << 40)
    assert bucket.wait_s() == 0
