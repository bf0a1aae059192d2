"""A node of a cluster that is killed while programs have its files open, and started again."""

import contextlib
import mmap
import os
from pathlib import Path

import pytest

from tests.cluster.waiting import wait_until
from tests.integration.harness import best_mode
from tests.integration.several import several

CONTENT = b"first" * 4000


@pytest.mark.skipif(best_mode() != "passthrough", reason="by passthrough alone writers outlive it")
def test_what_was_open_before_the_kill_is_the_same_everywhere_after_it() -> None:
    with several(2) as cluster:
        here, there = (node.mount / "models" for node in cluster.nodes)
        for name in ("written", "mapped"):
            (here / name).write_bytes(CONTENT)
            assert (there / name).read_bytes() == CONTENT
        written, mapped = (os.open(here / name, os.O_RDWR) for name in ("written", "mapped"))
        view = mmap.mmap(mapped, len(CONTENT))
        os.close(mapped)
        view[:5] = b"early"
        os.pwrite(written, b"early", 0)
        cluster.nodes[0].kill()
        cluster.nodes[0].up()

        def is_one() -> bool:
            return contents(here) == contents(there)

        wait_until(is_one, "both nodes have the same content")
        before = contents(there)
        os.pwrite(written, b"LATE!", 0)
        view[:5] = b"LATE!"
        view.close()
        with contextlib.suppress(OSError):  # there is nobody to be told of it
            os.close(written)
        assert is_one()
        assert contents(there) == before


def contents(top: Path) -> list[bytes]:
    return [(top / name).read_bytes() for name in ("written", "mapped")]
