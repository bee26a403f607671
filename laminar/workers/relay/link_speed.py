"""Whether a link holds the chain up: it carries far less than another link of the same relay did.

Pure: seconds and bytes are given. Only time in which bytes were due counts, so a link that has nothing to carry is not slow, and
one that is as slow as all others is not either.

Invariants:
* A link is called slow at most once, after `WINDOWS` windows in a row in which it was.
* A relay that called a link slow expects no more of the next one, until a link was faster.
"""

SLOW_FACTOR = 10.0  # much more than what traffic of others or a busy peer takes from a link
WINDOW_S = 2.0  # of sending: a process that is starved for a second does not fill it
WINDOWS = 2
COMPARED_BYTES = (
    32 << 20
)  # what buffers between two relays hold, some MiB, must not be taken for the speed of their link


class Fastest:
    """Bytes per second of the fastest link that this relay had. Links of one relay are compared in threads: a float is replaced."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0

    def saw(self, num_bytes: int, seconds: float) -> None:
        """A link carried so many bytes in so long, waiting included."""
        if num_bytes >= COMPARED_BYTES:
            self.bytes_per_s = max(self.bytes_per_s, num_bytes / max(seconds, 1e-9))

    def settle_for(self, bytes_per_s: float) -> None:
        """This is what there is."""
        self.bytes_per_s = bytes_per_s


class LinkSpeed:
    """Of one link, towards downstream."""

    def __init__(self, fastest: Fastest) -> None:
        self._fastest = fastest
        self._num_bytes, self._seconds = 0, 0.0
        """Of the present window."""
        self._num_slow = 0
        self._told = False

    def sent(self, num_bytes: int, seconds: float) -> bool:
        """So many bytes were handed over in so long. True when the link is to be called slow, now."""
        self._num_bytes += num_bytes
        self._seconds += seconds
        if self._seconds < WINDOW_S:
            return False
        bytes_per_s = self._num_bytes / self._seconds
        self._num_slow = self._num_slow + 1 if bytes_per_s * SLOW_FACTOR < self._fastest.bytes_per_s else 0
        self._fastest.saw(self._num_bytes, self._seconds)
        self._num_bytes, self._seconds = 0, 0.0
        if self._num_slow < WINDOWS or self._told:
            return False
        self._told = True
        self._fastest.settle_for(bytes_per_s)
        return True
