"""A namespace ends being `peer` while it has files and is used, on two nodes, of which one is
killed meanwhile: no file is lost or changed, and none that was removed comes back."""

from pathlib import Path

from tests.cluster.waiting import wait_until
from tests.integration.coherence.coherence_clients import (
    DIRECTORIES,
    Clients,
    change,
    changed_while_used,
    content,
    is_there,
    waits_for,
)
from tests.integration.several import Several


def test_it_ends_being_peer_while_it_is_used(cluster: Several) -> None:
    one, other = cluster.nodes
    change(one, "create", "blocks", "--kind", "cache", "--coherence", "peer")
    wait_until((other.mount / "blocks").is_dir, "the other node knows it")
    clients = Clients([node.mount / "blocks" for node in cluster.nodes])
    for number in range(DIRECTORIES):
        for top in clients.tops:
            (top / f"d{number}").mkdir(exist_ok=True)
    changed_while_used(one, clients, "cache")

    def listed(top: Path) -> list[str]:
        return sorted(path.name for path in top.rglob("*"))

    here, there = clients.tops
    wait_until(lambda: listed(here) == listed(there), "both list the same")


def test_no_kill_loses_a_file(cluster: Several) -> None:
    """Each node is killed while they tell: the namespace stays peer, and is used, or has changed;
    in the end it changes."""
    one, other = cluster.nodes
    change(one, "create", "more", "--kind", "cache", "--coherence", "peer")
    wait_until((other.mount / "more").is_dir, "the other node knows it")
    everything: list[str] = []
    for node in cluster.nodes:
        for each in range(50):
            everything.append(f"{node.mount.parent.name}-{each}")
            (node.mount / "more" / everything[-1]).write_bytes(content(everything[-1]))
    for killed in (other, one):
        if "peer" not in waits_for(other, "more"):
            break
        change(one, "set", "more", "--coherence", "cache")
        killed.kill()
        killed.up()
        for node in cluster.nodes:
            wait_until(lambda: "waits" not in waits_for(node, "more"), "it is settled", 60)  # noqa: B023
        for node in cluster.nodes:
            for name in everything:
                wait_until(lambda: is_there(node.mount / "more" / name, name), f"{name} is there")  # noqa: B023
            name = f"{node.mount.parent.name}-after-{killed.mount.parent.name}"
            (node.mount / "more" / name).write_bytes(content(name))
            everything.append(name)
    if "peer" in waits_for(one, "more"):
        change(one, "set", "more", "--coherence", "cache")
        wait_until(lambda: "waits" not in waits_for(one, "more"), "it is done", 60)
    assert "peer" not in waits_for(one, "more")
    for node in cluster.nodes:
        for name in everything:
            wait_until(lambda: is_there(node.mount / "more" / name, name), f"{name} is there")  # noqa: B023
        wait_until(
            lambda: sorted(e.name for e in (node.mount / "more").iterdir()) == sorted(everything),  # noqa: B023
            "both list the same",
        )
