"""How the replica of a node is, for its status, metrics and whoever asks how fresh it is."""

from kvfs.base.clock import now
from kvfs.meta.node_leases import Lost
from kvfs.meta.shards.following import HEAD_S
from kvfs.meta.shards.shard_replica import ReplicaParts
from kvfs.meta.shards.shard_set import ShardSet


class ReplicaStatus:
    """The part of an engine that tells it."""

    def __init__(self, parts: ReplicaParts) -> None:
        self._map = parts.shards
        self._shards = ShardSet(parts)

    @property
    def position(self) -> int:
        """The number of the last commit that the replica holds."""
        return self._shards.top.applier.mark.position

    @property
    def server(self) -> str:
        """The server that was asked last, of those of the URL or of their cluster."""
        return str(self._shards.top.proposing.at)

    @property
    def is_full(self) -> bool:
        """Whether the server had no memory for the last change that would add."""
        return any(each.proposer.is_full for each in self._shards.all)

    @property
    def unplaced(self) -> int:
        """Files that were closed here and had lost their places when others were told of them:
        their names, to files that others closed meanwhile, or their directories. Since the
        start."""
        return sum(each.proposer.unplaced for each in self._shards.all)

    @property
    def is_away(self) -> bool:
        """Whether the engine does not answer, or has lost what the replica has."""
        return self._shards.top.follower.is_away

    @property
    def loss(self) -> str | None:
        """The metadata that the engine, though it answers, has not any more, and the remedy; None:
        none are missed."""
        failure = self._shards.top.follower.failure
        return str(failure) if isinstance(failure, Lost) else None

    @property
    def silent_s(self) -> float:
        """The seconds since the replica held everything committed, at least."""
        return max(0.0, now() - self._shards.top.follower.known_at)

    @property
    def refusal(self) -> str | None:
        """The reason why the replica cannot take the commits of others (its disk is full, for one),
        or None."""
        return next(filter(None, (each.applier.refusal for each in self._shards.all)), None)

    def heard_at(self, namespace_id: int = 0) -> float:
        """The time when the replica held everything committed of a namespace, at least, by
        `clock.now`; 0: it is not fit for use."""
        shards = self._shards
        if not self._map.spaces:
            return shards.top.follower.heard_at
        if (found := shards.others.get(namespace_id)) is not None:
            shards.following.used(namespace_id)
            return found.follower.heard_at
        return 0.0 if shards.following.is_own(namespace_id) else shards.top.follower.heard_at

    async def until_heard_again(self, namespace_id: int) -> None:
        """Returns when the engine is heard of a namespace the next time, of whatever moment; at
        once while it is away. Cancelled: nothing happened."""
        await self._shards.of(namespace_id).follower.until_heard_again()

    def heard_apart(self) -> dict[int, float]:
        """Returns the same of each namespace with a shard of its own; 0 where it is not
        followed."""
        following = self._shards.following
        followed = {each.shard: each.follower.heard_at for each in following.others.values()}
        return followed | dict.fromkeys(following.unfollowed(), 0.0)

    def shards(self) -> list[dict[str, object]]:
        """Returns how each shard of a namespace is, in JSON's types."""
        remote = self._shards.following.remote
        followed: list[dict[str, object]] = [
            {
                "namespace": each.shard,
                "server": each.server,
                "position": each.applier.mark.position,
                "silent_s": max(0.0, now() - each.follower.known_at),
                "is_away": each.follower.is_away,
                "state": "followed" if each.is_whole else "being read",
            }
            for each in self._shards.others.values()
        ]
        return followed + [
            {
                "namespace": shard,
                "server": remote.server(shard),
                "position": 0,
                "silent_s": max(0.0, now() - remote.heard_at(shard) - HEAD_S),
                "state": "not followed",
            }
            for shard in self._shards.following.unfollowed()
        ]

    @property
    def round_trips(self) -> int:
        """Requests sent for transactions and look-ups so far."""
        asked = sum(caller.requests for each in self._shards.all for caller in each.callers[:2])
        return asked + self._shards.following.remote.requests
