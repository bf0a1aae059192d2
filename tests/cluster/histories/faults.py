"""What happens to the hosts of a campaign while they work."""

import signal
from collections.abc import Callable
from typing import Final, NamedTuple

from tests.cluster import engine
from tests.cluster.cluster import Cluster, Host
from tests.cluster.network import Ways

WAYS: Final[tuple[Ways, ...]] = ("both", "in", "out")


class Fault(NamedTuple):
    begin: Callable[[], object]
    end: Callable[[], object]
    name: str
    hosts: frozenset[int] = frozenset()
    """Those that it keeps from speaking with others."""
    empties: bool = False
    """Whether they give up what they hold."""


def faults_of(cluster: Cluster, host: Host, ways: Ways, *, with_stops: bool) -> list[Fault]:
    """What may happen to this host, and to the engine."""
    network, server = cluster.network, cluster.engine
    alone = frozenset([host.number])
    faults = [
        Fault(host.kill, host.up, f"kill node {host.number}", alone),
        Fault(
            lambda: network.cut(host.name, ways),
            lambda: network.heal(host.name),
            f"cut node {host.number} off ({ways})",
            alone,
        ),
        Fault(server.kill, server.start, "kill the engine"),
        Fault(
            lambda: network.cut(engine.HOST, ways),
            lambda: network.heal(engine.HOST),
            f"cut the engine off ({ways})",
        ),
        Fault(
            lambda: server.signal(signal.SIGSTOP),
            lambda: server.signal(signal.SIGCONT),
            "stop the engine",
        ),
    ]
    if with_stops:
        faults.append(
            Fault(
                lambda: host.signal(signal.SIGSTOP),
                lambda: host.signal(signal.SIGCONT),
                f"stop node {host.number}",
                alone,
            )
        )
    return faults
