"""Users and access keys in the engine."""

import pytest

from kvfs.base.errors import Corrupt, Exists, Invalid, NotFound, TooLarge
from kvfs.meta import keys
from kvfs.tree import identities
from tests.contract.memory_engine import MemoryEngine


@pytest.fixture
def engine() -> MemoryEngine:
    found = MemoryEngine()
    found.transact_now(lambda t: identities.create(t, "ann", "KEY1", b"s1", policy="{}", now=5))
    return found


def test_an_access_key_leads_to_its_user(engine: MemoryEngine) -> None:
    assert engine.read_now(lambda t: identities.find(t, "KEY1")) == ("ann", True, "{}", b"s1")
    assert engine.read_now(lambda t: identities.find(t, "KEY2")) is None
    assert engine.read_now(lambda t: identities.find(t, "\0" * 600)) is None


def test_users_are_listed_by_name(engine: MemoryEngine) -> None:
    engine.transact_now(lambda t: identities.create(t, "Bob", "KEY2", b"s2", now=6))
    found = engine.read_now(identities.list_all)
    assert [(name, user.access_keys, user.created_ns) for name, user in found] == [
        ("Bob", ["KEY2"], 6),
        ("ann", ["KEY1"], 5),
    ]


def test_a_user_can_be_disabled(engine: MemoryEngine) -> None:
    for enabled in (False, True):
        engine.transact_now(lambda t, to=enabled: identities.set_enabled(t, "ann", to))
        identity = engine.read_now(lambda t: identities.find(t, "KEY1"))
        assert identity is not None
        assert identity.enabled is enabled


def test_a_policy_can_be_changed(engine: MemoryEngine) -> None:
    engine.transact_now(lambda t: identities.set_policy(t, "ann", '{"a": 1}'))
    identity = engine.read_now(lambda t: identities.find(t, "KEY1"))
    assert identity is not None
    assert identity.policy == '{"a": 1}'
    with pytest.raises(TooLarge):
        engine.transact_now(lambda t: identities.set_policy(t, "ann", "x" * 20_481))


def test_rotation_leaves_one_new_key(engine: MemoryEngine) -> None:
    old = engine.transact_now(lambda t: identities.rotate(t, "ann", "KEY2", b"s2", now=9))
    assert old == ["KEY1"]
    assert engine.read_now(lambda t: identities.find(t, "KEY1")) is None
    assert engine.read_now(lambda t: identities.find(t, "KEY2")) == ("ann", True, "{}", b"s2")


def test_a_removed_user_leaves_nothing(engine: MemoryEngine) -> None:
    assert engine.transact_now(lambda t: identities.remove(t, "ann")) == ["KEY1"]
    assert engine.read_now(lambda t: list(t.scan(b"", b"\xff"))) == []
    with pytest.raises(NotFound):
        engine.read_now(lambda t: identities.get(t, "ann"))


@pytest.mark.parametrize(
    ("name", "access_key", "error"),
    [
        ("ann", "KEY2", Exists),
        ("bob", "KEY1", Exists),
        ("", "KEY2", Invalid),
        ("b/b", "KEY2", Invalid),
        ("b" * 65, "KEY2", Invalid),
        ("bob", "K", Invalid),
        ("bob", "KEY/2", Invalid),
    ],
)
def test_what_cannot_be_added(
    engine: MemoryEngine, name: str, access_key: str, error: type[Exception]
) -> None:
    with pytest.raises(error):
        engine.transact_now(lambda t: identities.create(t, name, access_key, b"s", now=7))
    assert len(engine.read_now(identities.list_all)) == 1


def test_a_key_without_its_user_is_corrupt(engine: MemoryEngine) -> None:
    engine.transact_now(lambda t: t.delete(keys.user("ann")))
    with pytest.raises(Corrupt):
        engine.read_now(lambda t: identities.find(t, "KEY1"))
