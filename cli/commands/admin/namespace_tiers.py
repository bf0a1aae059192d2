"""The settings of a namespace that need tiers which this node has."""

from typing import TYPE_CHECKING

from cli import node_requests
from kvfs.base.config import Config
from kvfs.base.errors import NotSupported, Unavailable
from kvfs.base.media import is_medium

if TYPE_CHECKING:
    from kvfs.tree.namespace_policies import PolicyChanges


def require(config: Config, wanted: "PolicyChanges") -> None:
    """Raises NotSupported if a namespace is to use a tier that is missing: on the running node, or
    by the settings if none runs."""
    if wanted.get("cold") and not _has_cold_tier(config):
        raise NotSupported(
            "there is no cold tier: name one with the setting cold (--cold s3://BUCKET/PREFIX of "
            "`kvfs up`)"
        )

    lent = _lent(config) if wanted.get("media") else set()
    for medium in wanted.get("media") or []:
        if medium != "ssd" and is_medium(medium) and medium not in lent:
            raise NotSupported(
                f"the node has no {medium}: name a place with --tier ram=DIR:SIZE or --shared "
                "NAME=DIR of `kvfs up`"
            )


def _has_cold_tier(config: Config) -> bool:
    try:
        return node_requests.ask(config, "status")["cold"] is not None
    except Unavailable:
        return bool(config.cold)


def _lent(config: Config) -> set[str]:
    try:
        return {each["medium"] for each in node_requests.ask(config, "status")["tiers"]}
    except Unavailable:
        return {each.medium for each in (*config.tier, *config.shared)}
