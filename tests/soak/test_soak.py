"""A minute of `./dev soak`."""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from s3api.auth.credentials import Credentials
from tests.cluster.cluster import Cluster, Host
from tests.cluster.conftest import root
from tests.cluster.histories.events import Disturbance
from tests.integration.harness import best_mode
from tests.soak.faults import own_disks
from tests.soak.loads import LoadError, Loads
from tests.soak.soak import SERVES, Soak
from tests.soak.vital_signs import Sample, VitalSigns

__all__ = ["root"]  # a fixture
_SECONDS = 60.0


@pytest.mark.timeout(900)
def test_a_minute_under_load_and_faults(root: Path, seed: int) -> None:
    with own_disks(root, range(1, 4)), Cluster(root, 3, *SERVES, "--mode", best_mode()) as cluster:
        result = Soak(cluster, seed, print).run(_SECONDS)
        assert result.complaints == []
        assert {
            "blocks written",
            "blocks read",
            "weights read",
            "objects got",
        } <= result.loads.keys()
        assert result.rounds


class _NoCluster:
    """Of no node."""

    def __iter__(self) -> Iterator[Host]:
        return iter(())


@pytest.mark.parametrize(
    ("rss", "descriptors", "says"),
    [
        ([100 << 20] * 90, [50] * 90, ""),
        ([(100 + 3 * n) << 20 for n in range(90)], [50] * 90, "memory of process 7 grew"),
        ([100 << 20] * 90, [50 + 20 * n for n in range(90)], "descriptors of process 7 grew"),
        ([(100 + 8 * n) << 20 for n in range(30)], [50] * 30, ""),
        ([600 << 20], [50], "too much"),
    ],
)
def test_what_grows_is_seen(rss: list[int], descriptors: list[int], says: str) -> None:
    signs = VitalSigns(cast(Cluster, _NoCluster()))
    signs.samples += [
        Sample(float(at), 1, 7, *each) for at, each in enumerate(zip(rss, descriptors, strict=True))
    ]
    found = signs.complaints()
    assert (found[0] if found else "").startswith(says)
    assert bool(found) == bool(says)


def test_an_error_counts_where_nothing_was_disturbed() -> None:
    soak = Soak(cast(Cluster, _NoCluster()), 0, print)
    soak.disturbances.append(Disturbance(100.0, 110.0, frozenset([1]), False))
    loads = Loads(cast(Cluster, _NoCluster()), cast(Credentials, None), 0)
    for at in (50.0, 98.0, 105.0, 120.0, 300.0):
        loads.journal.errors.append(LoadError(at, at + 3.0, 2, "blocks", f"at {at}"))
    loads.journal.wrong.append("blocks/a: others")
    soak.judge(loads)
    told = "\n".join(soak.result.complaints)
    assert soak.result.errors_in_faults == 3
    assert all(each in told for each in ("at 50.0", "at 300.0", "wrong content"))
