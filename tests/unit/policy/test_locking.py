"""Locks on ranges, against a model that keeps a holder for each byte and owner."""

from hypothesis import given
from hypothesis import strategies as st

from kvfs.policy.byte_range_locks import ByteRangeLock, LockOwner, granted, obstacle, released

BYTES = 12
OWNERS = [LockOwner(1, 1, 1), LockOwner(1, 1, 2), LockOwner(2, 1, 1)]
Model = dict[tuple[LockOwner, int], bool]
"""Who has which byte, and whether for itself alone."""

ranges = st.tuples(st.integers(0, BYTES - 1), st.integers(0, BYTES - 1)).map(sorted)
steps = st.lists(
    st.tuples(st.sampled_from(OWNERS), ranges, st.sampled_from(["shared", "exclusive", "release"])),
    max_size=30,
)


def as_model(held: list[ByteRangeLock]) -> Model:
    return {
        (lock.owner, byte): lock.exclusive
        for lock in held
        for byte in range(lock.start, lock.end + 1)
    }


def may_have(model: Model, owner: LockOwner, start: int, end: int, exclusive: bool) -> bool:
    return not any(
        other != owner and start <= byte <= end and (exclusive or theirs)
        for (other, byte), theirs in model.items()
    )


@given(steps)
def test_locks_are_held_byte_by_byte(
    taken: list[tuple[LockOwner, list[int], str]],
) -> None:
    held: list[ByteRangeLock] = []
    model: Model = {}
    for owner, (start, end), what in taken:
        if what == "release":
            held = released(held, owner, start, end)
            for byte in range(start, end + 1):
                model.pop((owner, byte), None)
        else:
            wish = ByteRangeLock(owner, what == "exclusive", start, end)
            free = may_have(model, owner, start, end, wish.exclusive)
            assert (obstacle(held, wish) is None) is free
            if free:
                held = granted(held, wish)
                model.update({(owner, byte): wish.exclusive for byte in range(start, end + 1)})
        assert as_model(held) == model
        assert sum(lock.end - lock.start + 1 for lock in held) == len(model), "they overlap"


@given(steps)
def test_neighbours_of_one_kind_are_one_lock(taken: list[tuple[LockOwner, list[int], str]]) -> None:
    held: list[ByteRangeLock] = []
    for owner, (start, end), what in taken:
        wish = ByteRangeLock(owner, what == "exclusive", start, end)
        if obstacle(held, wish) is None:
            held = granted(held, wish)
    for lock in held:
        after = [each for each in held if each.start == lock.end + 1 and each.owner == lock.owner]
        assert all(each.exclusive != lock.exclusive for each in after)
