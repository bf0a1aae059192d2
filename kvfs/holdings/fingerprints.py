"""Fingerprints of names: 48 bits that stand for a path of a namespace where nodes tell each other
which blocks they hold. Pure.

They are keyed by the cluster's secret, so no client can choose names whose fingerprints collide.
Two different names have the same one with a probability of 2**-48; a claim of a fingerprint is
therefore never proof: only its holder can say whether it has the name.

Layout: the low 10 bits are the fingerprint's range, the unit of comparison and repair between
nodes; a table's row is chosen by the low bits, and the high 32 are the tag that it stores.
"""

import hashlib
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

U64: TypeAlias = NDArray[np.uint64]
"""An array of fingerprints, or of their sums."""
BITS: Final = 48
RANGES: Final = 1024
"""Ranges into which the fingerprints of a node fall."""
NONE: Final[U64] = np.zeros(0, np.uint64)
"""No fingerprints."""
_LABEL: Final = b"kvfs fingerprint"
_UNUSED_BITS: Final = 64 - BITS
RANGE_BITS: Final = RANGES.bit_length() - 1
_REST_BITS: Final = BITS - RANGE_BITS
_hash: Final = xxhash.xxh3_64_intdigest


def derive_seed(secret: bytes) -> int:
    """Returns the 64-bit seed of a cluster's fingerprints, from a secret of any length that all its
    nodes have. It reveals nothing of the secret."""
    digest = hashlib.blake2b(secret, digest_size=8, person=_LABEL).digest()
    return int.from_bytes(digest, "little")


class Fingerprinter:
    """Computes fingerprints of the paths of one namespace: xxh3-64, seeded by the cluster's seed
    and the namespace."""

    __slots__ = ("_seed",)

    def __init__(self, seed: int, namespace: bytes) -> None:
        """`namespace`: what identifies it, the same bytes on all nodes."""
        self._seed = _hash(namespace, seed)

    def of(self, path: bytes) -> int:
        """Returns the fingerprint of a path."""
        return _hash(path, self._seed) >> _UNUSED_BITS

    def of_all(self, paths: Sequence[bytes]) -> U64:
        """Returns the fingerprints of these paths, in their order."""
        seed = self._seed
        hashes = np.fromiter([_hash(path, seed) for path in paths], np.uint64, len(paths))
        hashes >>= np.uint64(_UNUSED_BITS)
        return hashes


def gathered(fingerprints: Sequence[int]) -> U64:
    """Returns the fingerprints as an array, in their order."""
    return np.array(fingerprints, np.uint64)


def ranges_of(fingerprints: U64) -> NDArray[np.int64]:
    """Returns the range of each."""
    return (fingerprints & np.uint64(RANGES - 1)).view(np.int64)


def turned(fingerprints: U64) -> U64:
    """Returns each with its range as the highest bits: those of a few ranges then differ in their
    low bits as much as those of all."""
    upper = (fingerprints & np.uint64(RANGES - 1)) << np.uint64(_REST_BITS)
    return upper | fingerprints >> np.uint64(RANGE_BITS)


def turned_back(keys: U64) -> U64:
    """Returns the fingerprints of which `turned` made these."""
    lower = keys >> np.uint64(_REST_BITS)
    return (keys & np.uint64((1 << _REST_BITS) - 1)) << np.uint64(RANGE_BITS) | lower


def turned_one(fingerprint: int) -> int:
    """Does what `turned` does, for one."""
    return (fingerprint & RANGES - 1) << _REST_BITS | fingerprint >> RANGE_BITS


def range_of_turned(key: int) -> int:
    """Returns the range of a turned fingerprint."""
    return key >> _REST_BITS


def mixed(fingerprints: U64) -> U64:
    """Returns 64 bits of each that look random (splitmix64's finaliser): their sum is the checksum
    of a set."""
    mix = (fingerprints + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)  # 0 must not be 0
    mix ^= mix >> np.uint64(30)
    mix *= np.uint64(0xBF58476D1CE4E5B9)
    mix ^= mix >> np.uint64(27)
    mix *= np.uint64(0x94D049BB133111EB)
    mix ^= mix >> np.uint64(31)
    return mix


def sums_by_range(fingerprints: U64) -> U64:
    """Returns the checksum of each range of a set: the sum of what `mixed` makes of its members,
    modulo 2**64."""
    sums = np.zeros(RANGES, np.uint64)
    if not len(fingerprints):
        return sums
    np.add.at(sums, ranges_of(fingerprints), mixed(fingerprints))
    return sums


def total(sums: U64) -> int:
    """Returns the digest of a whole set: the sum of its ranges' checksums, modulo 2**64."""
    return int(sums.sum(dtype=np.uint64))
