"""What may be set of a namespace."""

from typing import Any

import pytest

from kvfs.base.errors import Invalid, NotSupported
from kvfs.meta.records import Namespace
from kvfs.tree import namespace_policies


def changed(*, in_cluster: bool = True, **policy: Any) -> Namespace:
    record = Namespace(name=b"n")
    namespace_policies.change(record, policy, in_cluster=in_cluster)  # type: ignore[arg-type]
    return record


def test_what_is_none_stays() -> None:
    record = changed(kind="cache", capacity=None, replicas=2)
    assert (record.kind, record.capacity, record.replicas) == ("cache", 0, 2)


@pytest.mark.parametrize(
    ("kind", "coherence", "strict"),
    [
        ("durable", "", True),
        ("cache", "", False),
        ("durable", "cache", False),
        ("cache", "strict", True),
    ],
)
def test_durable_namespaces_are_strict_unless_told_otherwise(
    kind: str, coherence: str, strict: bool
) -> None:
    assert changed(kind=kind, coherence=coherence).is_strict is strict


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kind", "none"),
        ("eviction", "random"),
        ("coherence", "eventual"),
        ("acknowledge", "never"),
        ("locks", "world"),
        ("media", ["tape"]),
        ("media", ["ssd", "ssd"]),
        ("capacity", -1),
        ("replicas", -1),
        ("replicas", 16),
    ],
)
def test_what_makes_no_sense_is_refused(name: str, value: Any) -> None:
    with pytest.raises(Invalid):
        changed(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("coherence", "cache"), ("replicas", 1), ("acknowledge", "sync"), ("locks", "cluster")],
)
def test_a_lone_node_refuses_what_takes_several(name: str, value: object) -> None:
    with pytest.raises(NotSupported, match=f"^{name} is for several nodes"):
        changed(in_cluster=False, **{name: value})


def test_a_lone_node_takes_what_it_has_anyway() -> None:
    record = changed(in_cluster=False, coherence="", replicas=0, acknowledge="async", locks="host")
    assert record == Namespace(name=b"n")
