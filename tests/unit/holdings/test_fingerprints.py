"""Fingerprints: keyed, the same on every node, and different where the names are."""

import subprocess
import sys

import numpy as np

from kvfs.holdings import fingerprints
from kvfs.holdings.fingerprints import Fingerprinter, derive_seed

SEED = derive_seed(b"secret")


def test_a_batch_has_the_fingerprints_of_its_paths() -> None:
    own = Fingerprinter(SEED, b"kv")
    paths = [b"model/%d" % number for number in range(100)]
    batch = own.of_all(paths)
    assert batch.dtype == np.uint64
    assert batch.tolist() == [own.of(path) for path in paths]
    assert len(set(batch.tolist())) == len(paths)
    assert int(batch.max()) < 1 << fingerprints.BITS
    assert own.of_all([]).tolist() == []


def test_secret_and_namespace_change_every_fingerprint() -> None:
    makers = [
        Fingerprinter(derive_seed(secret), namespace)
        for secret in (b"secret", b"another", b"long" * 100)
        for namespace in (b"kv", b"kv2")
    ]
    assert len({each.of(b"path") for each in makers}) == len(makers)


def test_nodes_of_another_version_make_the_same_fingerprints() -> None:
    assert derive_seed(b"secret") == 0xBD664A1E078943E8
    assert Fingerprinter(SEED, b"kv").of(b"model/1") == 0xB5B367DD6F25


def test_checksums_are_the_same_in_any_order_and_differ_for_another_set() -> None:
    rng = np.random.default_rng(1)
    some = rng.integers(0, 1 << 48, 5000, dtype=np.uint64)
    sums = fingerprints.sums_by_range(some)
    assert (fingerprints.sums_by_range(rng.permutation(some)) == sums).all()
    differing = np.flatnonzero(fingerprints.sums_by_range(some[1:]) != sums)
    assert differing.tolist() == [int(some[0]) % fingerprints.RANGES]
    assert fingerprints.total(sums) != fingerprints.total(fingerprints.sums_by_range(some[1:]))


def test_a_node_starts_without_numpy() -> None:
    program = (
        "import sys, cli.main, gateway.service, kvfs.node.startup, kvfs.client.blocking;"
        "print('numpy' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout.strip() == "False", run.stderr
