"""What those are told who wait for a transfer that fails."""

import pytest
import trio
import trio.testing

from kvfs.base.errors import NotFound
from kvfs.transfer.transfer import Transfer, WantedFile


def test_each_who_waits_is_told_which_name_is_missing() -> None:
    """By the name the reason is found why it is missing; the errors are apart."""
    gone = NotFound("nobody has it; it is forgotten")
    gone.at = b"entry"
    transfer = Transfer(WantedFile(1, 0, 10, b""))
    told: list[NotFound] = []

    async def wait() -> None:
        with pytest.raises(NotFound, match="forgotten") as raised:
            await transfer.whole()
        told.append(raised.value)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            transfer.end(gone)

    trio.run(main)
    assert [each.at for each in told] == [b"entry", b"entry"]
    assert told[0] is not told[1]
