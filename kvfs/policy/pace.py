"""Limits the speed of background work: so many bytes per second, a second's worth at once. Pure."""


class Pace:
    """A budget that fills as time passes. A cost beyond its content is paid afterwards, by a longer
    wait: so a file larger than a second's worth passes too."""

    def __init__(self, bytes_per_s: float, now: float) -> None:
        """`now`: seconds of a clock that never goes back. 0 bytes per second: no limit."""
        self._rate = bytes_per_s
        self._filled = bytes_per_s
        self._at = now

    def spend(self, size: int, now: float) -> float:
        """Takes `size` bytes out, and returns how many seconds to wait before the work they are
        for."""
        if self._rate <= 0:
            return 0.0
        self._filled = min(self._filled + (now - self._at) * self._rate, self._rate)
        self._at = now
        wait = max(-self._filled, 0.0) / self._rate
        self._filled -= size
        return wait
