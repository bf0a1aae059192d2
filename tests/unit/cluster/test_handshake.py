"""Two nodes that meet: who has the secret is believed, nobody else."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.base.errors import AccessDenied, Conflict, Invalid, NotSupported
from kvfs.base.version import PROTOCOL, VERSION
from kvfs.cluster import secrets
from kvfs.cluster.handshake import LIMIT, Answering, Dialing, Party
from kvfs.cluster.secrets import Secrets

CLUSTER = "00112233445566ff"
ANOTHER = "ff66554433221100"
OURS = Secrets([secrets.generate(CLUSTER)])
OTHERS = Secrets([secrets.generate(CLUSTER)])
REFUSED = (AccessDenied, Invalid, Conflict, NotSupported)


def party(node: int, protocol: int = PROTOCOL, cluster: str = CLUSTER) -> Party:
    return Party(cluster, node, 1, f"host-{node}", protocol, VERSION)


def meet(dialing: Dialing, answering: Answering) -> tuple[Party, Party]:
    """Who each says the other is."""
    answered, proof = dialing.conclude(answering.reply(dialing.hello))
    return answered, answering.conclude(proof)


def test_who_has_the_secret_is_known_to_the_other() -> None:
    found = meet(Dialing(OURS, party(1)), Answering(OURS, party(2)))
    assert found == (party(2), party(1))


def test_another_secret_is_refused_by_who_is_asked() -> None:
    with pytest.raises(AccessDenied, match=r"node 1 \(host-1\) has another secret"):
        Answering(OURS, party(2)).reply(Dialing(OTHERS, party(1)).hello)


def test_who_only_claims_to_have_the_secret_is_refused_on_both_sides() -> None:
    """Their digests are no secret: anybody may name them."""

    class Pretender(Secrets):
        digests = OURS.digests

        def common(self, _wanted: object) -> secrets.Secret | None:
            return self[0]

    pretender = Pretender(OTHERS)
    answering = Answering(OURS, party(2))
    reply = answering.reply(Dialing(pretender, party(1)).hello)
    with pytest.raises(AccessDenied):
        Dialing(pretender, party(1)).conclude(reply)
    with pytest.raises(AccessDenied):
        answering.conclude(bytes(32))

    dialing = Dialing(OURS, party(1))
    forged = Answering(pretender, party(2)).reply(dialing.hello)
    with pytest.raises((AccessDenied, Invalid)):
        dialing.conclude(forged)


def test_while_a_secret_is_replaced_old_and_new_work() -> None:
    both = OURS.with_new()
    assert both.digests[1:] == OURS.digests
    new = Secrets(both[:1])
    for ours, theirs in ((both, OURS), (OURS, both), (both, new), (new, both)):
        assert meet(Dialing(ours, party(1)), Answering(theirs, party(2)))
    with pytest.raises(AccessDenied):
        meet(Dialing(OURS, party(1)), Answering(new, party(2)))


def test_a_proof_holds_for_its_own_meeting() -> None:
    dialing = Dialing(OURS, party(1))
    _, proof = dialing.conclude(Answering(OURS, party(2)).reply(dialing.hello))
    again = Answering(OURS, party(2))
    again.reply(dialing.hello)
    with pytest.raises(AccessDenied):
        again.conclude(proof)
    with pytest.raises(Invalid):
        again.conclude(proof)


def test_what_was_said_cannot_be_sent_back() -> None:
    """A node that is led to itself, or to one who repeats its words, does not believe them."""
    dialing, answering = Dialing(OURS, party(1)), Answering(OURS, party(2))
    reply = answering.reply(dialing.hello)
    proven = bytes(reply[-32:])
    with pytest.raises(AccessDenied):
        answering.conclude(proven)
    with pytest.raises(AccessDenied):
        Dialing(OURS, party(1)).conclude(reply)


@pytest.mark.parametrize("distance", [-1, 0, 1])
def test_one_protocol_apart_works(distance: int) -> None:
    assert meet(Dialing(OURS, party(1, PROTOCOL + distance)), Answering(OURS, party(2))) == (
        party(2),
        party(1, PROTOCOL + distance),
    )


@pytest.mark.parametrize("side", ["dialing", "answering"])
def test_two_apart_is_refused_with_both_versions(side: str) -> None:
    other = party(1, PROTOCOL + 2)
    with pytest.raises(NotSupported, match=rf"protocol {PROTOCOL + 2}\).*protocol {PROTOCOL}\)"):
        if side == "answering":
            Answering(OURS, party(2)).reply(Dialing(OURS, other).hello)
        else:
            dialing = Dialing(OURS, party(2))
            dialing.conclude(Answering(OURS, other).reply(dialing.hello))


def test_another_cluster_is_refused() -> None:
    theirs = Secrets([secrets.generate(ANOTHER)])
    with pytest.raises(Conflict, match="wrong host"):
        Answering(OURS, party(2)).reply(Dialing(theirs, party(1, cluster=ANOTHER)).hello)


def garbage(message: bytes, change: Callable[[bytearray], None]) -> bytes:
    changed = bytearray(message)
    change(changed)
    return bytes(changed)


@given(st.binary(max_size=2 * LIMIT))
def test_a_stranger_who_says_anything_is_refused(message: bytes) -> None:
    with pytest.raises(REFUSED):
        Answering(OURS, party(2)).reply(message)
    with pytest.raises(REFUSED):
        Dialing(OURS, party(1)).conclude(message)


@given(st.data())
def test_words_that_are_changed_on_their_way_are_refused(data: st.DataObject) -> None:
    def change(message: bytearray) -> None:
        place = data.draw(st.integers(0, len(message) - 1))
        message[place] ^= data.draw(st.integers(1, 255))

    which = data.draw(st.sampled_from(["hello", "reply", "proof"]))
    dialing, answering = Dialing(OURS, party(1)), Answering(OURS, party(2))
    hello = dialing.hello
    with pytest.raises(REFUSED):
        hello = garbage(hello, change) if which == "hello" else hello
        reply = answering.reply(hello)
        reply = garbage(reply, change) if which == "reply" else reply
        _, proof = dialing.conclude(reply)
        proof = garbage(proof, change) if which == "proof" else proof
        answering.conclude(proof)


def test_a_name_that_would_forge_a_line_of_a_log_is_refused() -> None:
    evil = Party(CLUSTER, 1, 1, "x\nERROR all is lost")
    with pytest.raises(Invalid):
        Answering(OURS, party(2)).reply(Dialing(OURS, evil).hello)


def test_no_secret_is_shown() -> None:
    text = OURS.as_text()
    key = text.strip().rpartition(":")[2]
    assert secrets.parse(text, "a file") == OURS
    assert key not in repr(OURS)
    assert key not in repr(OURS[0])
    with pytest.raises(Invalid) as caught:
        secrets.parse(f"kvfs-cluster:{CLUSTER}:{key[:-1]}", "a file")
    assert key[:-1] not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "kvfs-cluster:x:y", f"kvfs-cluster:{CLUSTER}:{'0' * 63}"]
)
def test_what_is_no_secret_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="the file"):
        secrets.parse(text, "the file")


def test_secrets_of_several_clusters_are_refused() -> None:
    text = OURS.as_text() + secrets.generate(ANOTHER).as_text()
    with pytest.raises(Invalid, match="several clusters"):
        secrets.parse(text, "the file")


def test_what_is_derived_differs_by_purpose_and_by_secret() -> None:
    derived = {secret.derive(p) for secret in (OURS[0], OTHERS[0]) for p in (b"a", b"b")}
    assert len(derived) == 4
