"""A namespace becomes `peer` while it has files and is used, on two nodes, of which one is killed
meanwhile: no file is lost or changed, and none that was removed comes back."""

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
from tests.integration.harness import kvfs
from tests.integration.several import Several


def test_it_becomes_peer_while_it_is_used(cluster: Several) -> None:
    one, other = cluster.nodes
    change(one, "create", "blocks", "--kind", "cache")
    wait_until((other.mount / "blocks").is_dir, "the other node knows it")
    clients = Clients([node.mount / "blocks" for node in cluster.nodes])
    for number in range(DIRECTORIES):
        (clients.tops[0] / f"d{number}").mkdir()
    changed_while_used(one, clients, "peer")
    used = one.status()["namespaces"]
    assert next(each for each in used if each["name"] == "blocks")["used_bytes"] > 0


def test_a_node_that_is_killed_meanwhile_does_its_part_later(cluster: Several) -> None:
    one, other = cluster.nodes
    change(one, "create", "more", "--kind", "cache")
    wait_until((other.mount / "more").is_dir, "the other node knows it")
    for node in cluster.nodes:
        for number in range(50):
            name = f"{node.mount.parent.name}-{number}"
            (node.mount / "more" / name).write_bytes(content(name))
    theirs = [f"{other.mount.parent.name}-{number}" for number in range(50)]
    wait_until(lambda: (one.mount / "more" / theirs[-1]).exists(), "the first node knows them")
    (one.mount / "more" / theirs[0]).unlink()
    other.kill()
    change(one, "set", "more", "--coherence", "peer")
    wait_until(lambda: waits_for(one, "more").endswith("waits for node 2)"), "it waits for it")
    refused = kvfs("namespace", "set", "more", "--coherence", "cache", "--store", str(one.store))
    assert "still becoming peer" in refused.stderr
    (one.mount / "more" / "later").write_bytes(content("later"))
    other.up()
    wait_until(lambda: "waits" not in waits_for(one, "more"), "it is done", 60)
    for node in cluster.nodes:
        for name in ("later", *theirs[1:]):
            wait_until(lambda: is_there(node.mount / "more" / name, name), f"{name} is there")  # noqa: B023
        assert not (node.mount / "more" / theirs[0]).exists()
