"""What a list of versions tells about each: what came before and after it of its key."""

import itertools
import stat
from datetime import UTC, datetime

from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.meta.records import Inode
from kvfs.objects.object_info import Facts
from s3api.server.lifecycle_worker import History

SECOND = 1_000_000_000


def facts(key: str, made_s: int, *, latest: bool, marker: bool) -> Facts:
    mode = stat.S_IFCHR if marker else stat.S_IFREG | 0o644
    made = made_s * SECOND
    inode = Inode(
        mode=mode,
        uid=0,
        gid=0,
        nlink=1,
        atime_ns=made,
        mtime_ns=made,
        ctime_ns=made,
        parent=1,
        name=key.encode(),
    )
    return Facts(key.encode(), made_s, inode, "etag", {}, f"v{made_s}", latest, marker)


def moment(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def listed(keys: dict[str, list[bool]]) -> list[Facts]:
    """Keys with their versions, whether each is a delete marker, newest first."""
    return [
        facts(key, 100 - place, latest=place == 0, marker=marker)
        for key, markers in sorted(keys.items())
        for place, marker in enumerate(markers)
    ]


@settings(max_examples=100)
@given(
    st.dictionaries(
        st.text("ab", min_size=1, max_size=3),
        st.lists(st.booleans(), min_size=1, max_size=6),
        max_size=5,
    ),
    st.lists(st.integers(0, 30), max_size=4),
)
def test_versions_in_pages(keys: dict[str, list[bool]], cuts: list[int]) -> None:
    versions, history = listed(keys), History()
    edges = [0, *sorted(min(cut, len(versions)) for cut in cuts), len(versions)]
    found = [
        each
        for start, end in itertools.pairwise(edges)
        for each in history.feed(versions[start:end])
    ]
    found += history.end()
    by_key: dict[str, dict[int, object]] = {}
    for each in found:
        by_key.setdefault(each.version.key, {})[each.facts.ino] = each.version
        if each.facts.latest:
            assert each.version.noncurrent_since is None
        else:
            # It ended when the next newer one was made, and counts those between.
            assert each.version.noncurrent_since == moment(each.facts.ino + 1)
            assert each.version.newer_noncurrent == 99 - each.facts.ino
    for key, markers in keys.items():
        # A latest marker is told of where it hides nothing any more, all else always.
        hidden = markers[0] and len(markers) > 1
        assert len(by_key.get(key, {})) == len(markers) - hidden
