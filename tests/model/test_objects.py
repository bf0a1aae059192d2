"""Random puts, copies and deletes with nasty keys, against a plain dictionary: every list is what
sorting the keys says, whatever the prefix, delimiter, start and length of its pages."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvfs.admin.fsck_records import RecordCheck
from kvfs.objects.mutations import Deleted
from kvfs.objects.object_errors import NoSuchKey
from tests.unit.object_space import ObjectSpace

_LONG = "x" * 479
SEGMENTS = st.sampled_from(
    [
        "",
        ".",
        "..",
        "a",
        "b",
        "a!",
        "a0",
        "%",
        "é",
        "a%",
        _LONG,
        _LONG + "x",
        _LONG + "xy",
        "x" * 500,
    ]
)
KEYS = (
    st.lists(SEGMENTS, min_size=1, max_size=4)
    .map(lambda parts: "/".join(parts).encode())
    .filter(lambda key: 0 < len(key) <= 1024)
)
STARTS = st.one_of(st.just(b""), KEYS, KEYS.map(lambda key: key[: len(key) // 2].rstrip(b"\xc3")))
DELIMITERS = st.sampled_from([b"", b"/", b"/", b"a", b"//", b"%", b"x", b"xx"])
STATES = st.sampled_from(["", "Enabled", "Suspended"])


@dataclass
class Version:
    marker: bool
    size: int
    null: bool
    id: str = ""


@dataclass
class Plain:
    """Versions of each key, newest first."""

    versions: dict[bytes, list[Version]] = field(default_factory=dict)

    def keys(self) -> list[bytes]:
        return sorted(key for key, found in self.versions.items() if found and not found[0].marker)

    def add(self, key: bytes, state: str, new: Version) -> None:
        found = self.versions.setdefault(key, [])
        new.null = state != "Enabled"
        if new.null:
            found[:] = [each for each in found if not each.null]
        found.insert(0, new)


def expected(
    keys: list[bytes], prefix: bytes, delimiter: bytes, start: bytes
) -> list[tuple[bytes, bool]]:
    """(entry, whether it is a common prefix)."""
    entries: dict[bytes, bool] = {}
    for key in keys:
        if not key.startswith(prefix):
            continue
        at = key.find(delimiter, len(prefix)) if delimiter else -1
        entry = key if at < 0 else key[: at + len(delimiter)]
        if entry > start:
            entries[entry] = at >= 0 or entries.get(entry, False)
    return sorted(entries.items())


class Objects(RuleBasedStateMachine):
    """A bucket that once keeps versions never goes back to not keeping them."""

    def __init__(self) -> None:
        super().__init__()
        self.space = ObjectSpace()
        self.plain = Plain()
        self.state = ""
        self.before = self.space.entries()

    @rule(state=STATES)
    def set_versioning(self, state: str) -> None:
        self.state = state or self.state

    @rule(key=KEYS, size=st.integers(0, 9999))
    def put(self, key: bytes, size: int) -> None:
        made = self.space.put(key, size=size, versioning=self.state)
        self.plain.add(key, self.state, Version(False, size, False, made.version))

    @rule(key=KEYS, pick=st.integers(0, 99))
    def delete(self, key: bytes, pick: int) -> None:
        there = self.plain.keys()
        key = there[pick % len(there)] if there and pick % 4 else key
        done = self.space.delete(key, self.state)
        current = key in there
        assert done.found == current
        assert done.delete_marker == bool(self.state)
        if self.state:
            self.plain.add(key, self.state, Version(True, 0, False, done.version))
        else:
            self.plain.versions.pop(key, None)

    @rule(pick=st.integers(0, 999))
    def delete_version(self, pick: int) -> None:
        every = [(key, each) for key, found in self.plain.versions.items() for each in found]
        if not every:
            return
        key, version = every[pick % len(every)]
        done = self.space.delete_version(key, version.id)
        assert done == Deleted(True, version.marker, version.id)
        self.plain.versions[key].remove(version)
        if not self.plain.versions[key]:
            del self.plain.versions[key]

    @rule(prefix=STARTS, delimiter=DELIMITERS, start=STARTS, limit=st.integers(1, 5))
    def look(self, prefix: bytes, delimiter: bytes, start: bytes, limit: int) -> None:
        wanted = expected(self.plain.keys(), prefix, delimiter, start)
        whole = self.space.list(prefix, delimiter, start)
        listed = [(each.key, False) for each in whole.objects]
        listed += [(each, True) for each in whole.prefixes]
        assert sorted(listed) == wanted
        assert [each.key for each in whole.objects] == sorted(each.key for each in whole.objects)
        assert whole.prefixes == sorted(whole.prefixes)
        assert not whole.truncated
        paged, at = [], start
        while True:
            page = self.space.list(prefix, delimiter, at, limit)
            paged += [(each.key, False) for each in page.objects]
            paged += [(each, True) for each in page.prefixes]
            assert len(page.objects) + len(page.prefixes) <= limit
            if not page.truncated:
                break
            at = page.following
        assert sorted(paged) == wanted
        assert len(paged) == len(wanted)

    @rule(prefix=STARTS, limit=st.integers(1, 3))
    def look_at_versions(self, prefix: bytes, limit: int) -> None:
        wanted = [
            (key, each.id, each.marker, at == 0)
            for key, found in sorted(self.plain.versions.items())
            if key.startswith(prefix)
            for at, each in enumerate(found)
        ]
        listed, key, version = [], b"", ""
        while True:
            page = self.space.versions(prefix, b"", key, version, limit)
            listed += [
                (each.key, each.version, each.delete_marker, each.latest) for each in page.versions
            ]
            if not page.truncated:
                break
            key, version = page.following, page.following_version
        assert listed == wanted

    @rule(prefix=STARTS, delimiter=DELIMITERS, limit=st.integers(1, 3))
    def look_at_versions_by_delimiter(self, prefix: bytes, delimiter: bytes, limit: int) -> None:
        keys = [key for key, found in self.plain.versions.items() for _ in found]
        wanted = [each for each, common in expected(keys, prefix, delimiter, b"") if common]
        listed, key, version = [], b"", ""
        while True:
            page = self.space.versions(prefix, delimiter, key, version, limit)
            listed += page.prefixes
            if not page.truncated:
                break
            key, version = page.following, page.following_version
        assert listed == wanted

    @rule(key=KEYS)
    def find(self, key: bytes) -> None:
        found = self.plain.versions.get(key, [])
        if not found:
            try:
                self.space.find(key)
            except NoSuchKey:
                return
            raise AssertionError(key)
        for at, each in enumerate(found):
            there = self.space.find(key, each.id)
            assert (there.size, there.delete_marker, there.latest) == (
                each.size,
                each.marker,
                at == 0,
            )
        assert self.space.find(key).version == found[0].id

    @invariant()
    def books_are_right(self) -> None:
        assert [each.detail for each in RecordCheck(self.space.engine).problems()] == []
        if not self.plain.versions:
            assert self.space.entries() == self.before


TestObjects = Objects.TestCase
TestObjects.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
