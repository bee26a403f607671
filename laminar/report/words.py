"""Times in words."""

import time


def date(at: float) -> str:
    """`at`: seconds since the epoch."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def duration(seconds: float) -> str:
    """3.4 s, 1 min 20 s, 2 h 5 min."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
