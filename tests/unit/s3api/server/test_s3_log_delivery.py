"""Access logs of buckets: what one bucket cannot deliver takes no room from the others."""

from types import SimpleNamespace
from typing import Any

import pytest
import trio

from kvfs.base.errors import NoSpace
from s3api.http.outcome import RequestOutcome
from s3api.server import log_delivery
from s3api.server.log_delivery import LogDelivery

_LINE = "x" * 1023 + "\n"
_MOST_LINES = log_delivery._MOST_BYTES // len(_LINE)


class Delivered:
    """A delivery whose `full` buckets take nothing; how many lines the others got."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = {b"full"}
        self.lines: dict[bytes, int] = {}
        self.delivery = LogDelivery(None, None, "", "")  # type: ignore[arg-type]
        monkeypatch.setattr(log_delivery, "line", lambda *_: _LINE)
        monkeypatch.setattr(log_delivery, "entries_of", lambda _: ())
        monkeypatch.setattr(self.delivery, "_put", self._put)

    def _put(self, bucket: bytes, lines: list[str]) -> None:
        if bucket in self.full:
            raise NoSpace("the target is full")
        self.lines[bucket] = self.lines.get(bucket, 0) + len(lines)

    def record(self, bucket: bytes, count: int) -> None:
        outcome = RequestOutcome("")
        call: Any = SimpleNamespace(settings={"logging": {}}, bucket="b", raw_bucket=bucket)
        outcome.call = call
        head: Any = SimpleNamespace(handled=outcome)
        for _ in range(count):
            self.delivery.record(head, 200, 0, 0.0)

    def deliver(self) -> None:
        trio.run(self.delivery.deliver)


@pytest.fixture
def delivered(monkeypatch: pytest.MonkeyPatch) -> Delivered:
    monkeypatch.setattr(log_delivery, "LOGGING", "logging")
    return Delivered(monkeypatch)


def test_a_bucket_that_cannot_deliver_costs_no_other_its_lines(delivered: Delivered) -> None:
    for _ in range(4):
        delivered.record(b"full", _MOST_LINES)
        delivered.record(b"other", 10)
        delivered.deliver()
    assert delivered.lines == {b"other": 40}
    delivered.full.clear()
    delivered.deliver()
    assert 0 < delivered.lines[b"full"] <= _MOST_LINES


def test_a_bucket_that_is_asked_much_leaves_room_for_the_others(delivered: Delivered) -> None:
    delivered.record(b"busy", 2 * _MOST_LINES)
    delivered.record(b"other", 10)
    delivered.deliver()
    assert delivered.lines[b"other"] == 10
    assert _MOST_LINES // 3 < delivered.lines[b"busy"] <= _MOST_LINES // 2


def test_what_could_not_be_delivered_comes_in_order(delivered: Delivered) -> None:
    delivered.record(b"full", 3)
    delivered.deliver()
    delivered.record(b"full", 2)
    delivered.full.clear()
    delivered.deliver()
    assert delivered.lines == {b"full": 5}
