"""One link over several others, whose bytes move at the same time: one stream is not enough for a fast card.

Both ends cut the link's bytes into units of 256 KiB from its beginning, whatever they were sent or asked for as, and deal the
units out to the stripes in turn. So nothing needs to be said about where a byte went.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from laminar.workers.transport.base import Link, LinkEnded

UNIT_BYTES = (
    256 << 10
)  # a digest block of 1 MiB keeps four streams busy; much smaller ones would cost more than they bring


class StripedLink:
    """See `Link`. It ends when one of its stripes does."""

    def __init__(self, stripes: Sequence[Link]) -> None:
        self.peer, self.medium = stripes[0].peer, stripes[0].medium
        self._stripes = stripes
        self._num_sent = self._num_received = 0
        # A pool for either direction: one that waits for bytes must not keep bytes of the other direction waiting.
        self._sending = ThreadPoolExecutor(len(stripes) - 1, "stripe-send")
        self._receiving = ThreadPoolExecutor(len(stripes) - 1, "stripe-receive")

    def promote(self) -> None:
        """There is nothing better to move to."""

    def send(self, *parts: memoryview | bytes) -> None:
        """All of them, in order."""
        for part in parts:
            view = memoryview(part)
            self._move(self._sending, lambda stripe, pieces: stripe.send(*pieces), view, self._num_sent)
            self._num_sent += view.nbytes

    def receive_into(self, view: memoryview) -> None:
        """Fill `view`."""
        self._move(self._receiving, _receive, view, self._num_received)
        self._num_received += view.nbytes

    def close(self) -> None:
        """End it, waking whoever waits in it."""
        for stripe in self._stripes:
            stripe.close()
        for pool in (self._sending, self._receiving):
            pool.shutdown(wait=False)  # what is submitted ends by itself: its socket is closed

    def _move(
        self,
        pool: ThreadPoolExecutor,
        move: Callable[[Link, list[memoryview]], None],
        view: memoryview,
        position: int,
    ) -> None:
        """The first stripe's part in this thread, the others' beside it. Returns when none of them touches `view` any more."""
        (first, pieces), *others = _dealt(view, position, self._stripes)
        moving: list[Future[None]] = []
        try:
            moving += [pool.submit(move, stripe, theirs) for stripe, theirs in others]
            move(first, pieces)
            for each in moving:
                each.result()
        except RuntimeError as error:  # `close` has shut the pool down
            raise LinkEnded(f"the link to {self.peer} was closed") from error
        except LinkEnded:
            self.close()
            raise
        finally:
            wait(moving)


def _receive(stripe: Link, pieces: list[memoryview]) -> None:
    for piece in pieces:
        stripe.receive_into(piece)


def _dealt(view: memoryview, position: int, stripes: Sequence[Link]) -> list[tuple[Link, list[memoryview]]]:
    """Which stripes the bytes go over that lie at `position` of the link, each with its pieces in order; at least one."""
    dealt: dict[int, list[memoryview]] = {}
    at = 0
    while at < view.nbytes or not dealt:
        unit, begun = divmod(position + at, UNIT_BYTES)
        end = min(at + UNIT_BYTES - begun, view.nbytes)
        dealt.setdefault(unit % len(stripes), []).append(view[at:end])
        at = end
    return [(stripes[number], pieces) for number, pieces in dealt.items()]
