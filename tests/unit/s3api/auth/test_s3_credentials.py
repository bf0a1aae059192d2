"""Key pairs and sessions: who is found by them, and when no longer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.base.encryption import SecretKey
from kvfs.base.errors import Corrupt
from kvfs.tree import identities
from kvfs.tree.identities import Identity
from s3api.auth.credentials import (
    Credentials,
    KeyOwner,
    encrypt_secret,
    generate,
    resolve,
    start_session,
)
from s3api.http.s3_errors import S3Error
from tests.contract.memory_engine import MemoryEngine

KEY = SecretKey(b"k" * 32)
NOW = 1_700_000_000.0


class Store:
    """An engine with one user."""

    def __init__(self) -> None:
        self.engine = MemoryEngine()
        self.pair = generate()
        secret = encrypt_secret(KEY, self.pair)
        self.engine.transact_now(
            lambda t: identities.create(t, "ann", self.pair.access_key, secret, policy="{}", now=1)
        )

    def find(self, access_key: str) -> Identity | None:
        return self.engine.read_now(lambda t: identities.find(t, access_key))

    def resolve(self, pair: Credentials, now: float = NOW, key: SecretKey = KEY) -> KeyOwner | None:
        return resolve(key, self.find, pair.access_key, pair.session_token, now)

    def disable(self) -> None:
        self.engine.transact_now(lambda t: identities.set_enabled(t, "ann", False))


@pytest.fixture
def store() -> Store:
    return Store()


def code(store: Store, pair: Credentials, now: float = NOW, key: SecretKey = KEY) -> str:
    with pytest.raises(S3Error) as caught:
        store.resolve(pair, now, key)
    assert pair.secret not in repr(caught.value) + str(caught.value.extra)
    return caught.value.code


def test_a_key_pair_is_found(store: Store) -> None:
    known = store.resolve(store.pair)
    assert known is not None
    assert (known.user, known.policy, known.session_policy) == ("ann", "{}", "")
    assert known.secret.decode() == store.pair.secret


def test_generated_pairs_have_the_usual_lengths() -> None:
    pairs = [generate() for _ in range(20)]
    assert {(len(pair.access_key), len(pair.secret)) for pair in pairs} == {(20, 40)}
    assert len({pair.secret for pair in pairs}) == 20


def test_others_are_not_found(store: Store) -> None:
    assert store.resolve(generate()) is None
    store.disable()
    assert store.resolve(store.pair) is None


def test_a_secret_is_good_for_its_key_alone(store: Store) -> None:
    other = Credentials("OTHERKEY", store.pair.secret)
    stolen = encrypt_secret(KEY, store.pair)
    store.engine.transact_now(
        lambda t: identities.create(t, "bob", other.access_key, stolen, now=1)
    )
    with pytest.raises(Corrupt):
        store.resolve(other)


def test_a_session_ends(store: Store) -> None:
    pair = start_session(KEY, store.pair.access_key, now=NOW, duration_s=900, policy='{"only": 1}')
    known = store.resolve(pair, NOW + 899)
    assert known is not None
    assert (known.user, known.policy, known.session_policy) == ("ann", "{}", '{"only": 1}')
    assert (known.secret.decode(), known.expires) == (pair.secret, int(NOW) + 900)
    assert code(store, pair, NOW + 900) == "ExpiredToken"


def test_a_session_ends_with_its_user(store: Store) -> None:
    pair = start_session(KEY, store.pair.access_key, now=NOW, duration_s=900)
    store.disable()
    assert code(store, pair) == "InvalidToken"


def test_a_session_ends_with_the_key_it_came_from(store: Store) -> None:
    pair = start_session(KEY, store.pair.access_key, now=NOW, duration_s=900)
    store.engine.transact_now(lambda t: identities.rotate(t, "ann", "NEWKEY", b"s", now=2))
    assert code(store, pair) == "InvalidToken"


def test_a_token_is_good_for_its_session_alone(store: Store) -> None:
    pair = start_session(KEY, store.pair.access_key, now=NOW, duration_s=900)
    lent = Credentials(store.pair.access_key, store.pair.secret, pair.session_token)
    assert code(store, lent) == "InvalidToken"
    assert code(store, pair, key=SecretKey(b"o" * 32)) == "InvalidToken"
    assert store.resolve(Credentials(pair.access_key, pair.secret)) is None


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.text(min_size=1), st.text("abcAB01-_=", min_size=1, max_size=120)))
def test_junk_is_no_token(token: str) -> None:
    assert code(Store(), Credentials("KVFTKEY", "secret", token)) == "InvalidToken"


def test_sessions_have_limits() -> None:
    for duration_s, policy, expected in (
        (899, "", "ValidationError"),
        (43201, "", "ValidationError"),
        (900, "x" * 2049, "PackedPolicyTooLarge"),
    ):
        with pytest.raises(S3Error, match=expected):
            start_session(KEY, "KEY", now=NOW, duration_s=duration_s, policy=policy)


def test_nothing_secret_is_shown(store: Store) -> None:
    pair = start_session(KEY, store.pair.access_key, now=NOW, duration_s=900)
    known = store.resolve(pair)
    shown = (
        f"{pair!r} {pair} {known!r} {known} {KEY!r} {store.engine.read_now(identities.list_all)}"
    )
    for secret in (pair.secret, pair.session_token, store.pair.secret, "kkkk"):
        assert secret not in shown
