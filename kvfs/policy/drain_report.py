"""A drain as people are told of it: its progress with the time that is left, and the obstacles that
keep a node from being drained. Pure."""

from typing import Any, Final

from kvfs.base.units import format_size
from kvfs.policy.cluster_snapshot import ClusterSnapshot, Host
from kvfs.policy.placement import lends

_NODES_NAMED: Final = 3


class Obstacles:
    """The findings of one pass over a node's files: those that have to stay for now."""

    def __init__(self) -> None:
        self.in_use = 0
        """Files that are being made, written or read here, or that are still held."""
        self.shared = 0
        """Files in a shared store that no other living node shares."""
        self._homeless = 0
        self._homeless_bytes = 0
        self._media: set[str] = set()
        self._refused = 0
        self._refusal = ""

    def homeless(self, size: int, media: list[str]) -> None:
        """Notes that no other node has space for a file of `size` bytes on one of these media
        (empty: any)."""
        self._homeless += 1
        self._homeless_bytes += size
        self._media.update(media)

    def refused(self, refusals: dict[int, str]) -> None:
        """Notes the nodes with space that did not take a file, and their reasons."""
        self._refused += 1
        for node, why in refusals.items():
            self._refusal = f" (node {node}: {why})"

    def describe(self, snapshot: ClusterSnapshot, me: int) -> str:
        """Returns the obstacles in words for people; empty if there are none."""
        parts = []
        if self._homeless:
            others = [host for host in snapshot.open if host.number != me]
            parts.append(
                f"{_files(self._homeless)}, {format_size(self._homeless_bytes)}, for which "
                + (f"no other node has room{self._lacks(others)}" if others else "no node is there")
            )
        if self._refused:
            parts.append(f"{_files(self._refused)} that nobody took{self._refusal}")
        if self.shared:
            parts.append(f"{_files(self.shared)} in a shared store that no other node has")
        if self.in_use:
            parts.append(f"{_files(self.in_use)} in use")
        return "; ".join(parts)

    def _lacks(self, others: list[Host]) -> str:
        """Returns the space that the nodes closest to it still need to take all of it."""
        lenders = [host for host in others if lends(host, self._media)]
        lacking = sorted((self._homeless_bytes - host.room, host.number) for host in lenders)
        shown = [f"node {number} lacks {format_size(size)}" for size, number in lacking if size > 0]
        return f" ({', '.join(shown[:_NODES_NAMED])})" if shown else ""


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


class DrainProgress:
    """The progress since the drain began, or since the node was started. Times are in seconds, of
    one clock."""

    def __init__(self, files: int, size_bytes: int, now_s: float) -> None:
        """`files` and `size_bytes`: all that the node has."""
        self._left = files, size_bytes
        self._moved = 0, 0
        self._began_s = now_s

    def gone(self, size_bytes: int) -> None:
        """Counts a file that the node has no more."""
        self._left = max(self._left[0] - 1, 0), max(self._left[1] - size_bytes, 0)
        self._moved = self._moved[0] + 1, self._moved[1] + size_bytes

    def found(self, files: int, size_bytes: int) -> None:
        """Takes what was counted anew: files came, or went by other ways."""
        self._left = files, size_bytes

    def report(self, now_s: float) -> dict[str, Any]:
        """Returns it in JSON's types."""
        passed_s = max(now_s - self._began_s, 0.001)
        return {
            "files_left": self._left[0],
            "bytes_left": self._left[1],
            "files_moved": self._moved[0],
            "bytes_moved": self._moved[1],
            "bytes_per_s": self._moved[1] / passed_s,
            "passed_s": passed_s,
            "left_s": self._left_s(passed_s),
        }

    def _left_s(self, passed_s: float) -> float | None:
        """Returns the time that is left if all goes on as so far, by files or by bytes, whichever
        takes longer; None: nothing has moved yet."""
        if not self._moved[0]:
            return None if self._left[0] else 0.0
        pairs = [(left, done) for left, done in zip(self._left, self._moved, strict=True) if done]
        return max(left * passed_s / done for left, done in pairs)
