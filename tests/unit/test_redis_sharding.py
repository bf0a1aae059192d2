"""Where keys lie on a cluster: each in one shard, and ranges over shards in the order of keys."""

from hypothesis import given
from hypothesis import strategies as st

from kvfs.meta import keys
from kvfs.meta.redis.sharding import Layout, one_piece, pack_shards, pieces, unpack_shards

SPREAD = Layout.NAMESPACES
KEYS = st.one_of(
    st.builds(
        lambda kind, space, rest: kind + space.to_bytes(2) + rest,
        st.sampled_from(keys.OF_NAMESPACES),
        st.sampled_from([0, 1, 255, 256, 0xFFFF]),
        st.binary(max_size=3),
    ),
    st.binary(min_size=1, max_size=4).filter(lambda key: key[0] < 0xFF),
)


def test_what_belongs_to_a_namespace_lies_in_its_shard() -> None:
    ino = 7 << 48 | 5
    for key in (
        *(keys.inode(ino), keys.file_entry(ino, b"a"), keys.xattr(ino, b"a"), keys.orphan(ino)),
        *(keys.backlink(ino, ino, b"a"), keys.unsealed(ino), keys.unpublished(ino)),
        *(keys.reserved(ino), keys.namespace(7), keys.usage(7), keys.counter(7)),
        keys.setting(7, b"policy"),
    ):
        assert SPREAD.shard_of(key) == 7
        assert Layout.SINGLE.shard_of(key) == 0
    for key in (keys.VERSION, keys.user("a"), keys.access_key("k"), keys.notice(1, b"x")):
        assert SPREAD.shard_of(key) == 0


@given(st.sets(KEYS), KEYS, KEYS)
def test_pieces_cover_a_range_once_and_in_order(
    all_keys: set[bytes], one: bytes, two: bytes
) -> None:
    start, end = sorted((one, two))
    shards = sorted({0, *map(SPREAD.shard_of, all_keys)})
    found = [
        key
        for piece in pieces(start, end, shards)
        for key in sorted(all_keys)
        if SPREAD.shard_of(key) == piece.shard and piece.start <= key < piece.end
    ]
    assert found == [key for key in sorted(all_keys) if start <= key < end]


@given(st.sets(KEYS), KEYS, KEYS)
def test_a_range_of_one_piece_holds_no_other_shards_keys(
    all_keys: set[bytes], one: bytes, two: bytes
) -> None:
    start, end = sorted((one, two))
    piece = one_piece(SPREAD, start, end)
    if piece is not None:
        inside = {SPREAD.shard_of(key) for key in all_keys if start <= key < end}
        assert inside <= {piece.shard}
        assert (piece.start, piece.end) == (start, end)


def test_a_directory_is_one_piece() -> None:
    prefix = keys.entries(7 << 48 | 5)
    assert one_piece(SPREAD, prefix, keys.after(prefix)) == (7, prefix, keys.after(prefix))
    assert one_piece(SPREAD, b"u", b"v") is None


@given(st.sets(st.integers(0, 0xFFFF)))
def test_the_register_of_shards(shards: set[int]) -> None:
    assert unpack_shards(pack_shards(sorted(shards))) == sorted(shards | {0})
    assert unpack_shards(None) == [0]
