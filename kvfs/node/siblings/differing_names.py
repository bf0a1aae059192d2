"""Names under which two nodes have different content: each reads its own, and people are told."""

import logging
from typing import Any, Final, NamedTuple

log = logging.getLogger(__name__)
_SHOWN: Final = 16
_KNOWN: Final = 4096
"""Names that are remembered, so that each counts once."""


class _Name(NamedTuple):
    namespace_id: int
    path: bytes


class DifferingNames:
    """The names that one node met since its start."""

    def __init__(self) -> None:
        self._nodes: dict[_Name, int] = {}
        self.count = 0

    def found(self, namespace_id: int, path: bytes, node: int) -> None:
        """Notes that another node has other content under this name."""
        name = _Name(namespace_id, path)
        if name in self._nodes:
            return
        self.count += 1
        if self.count == 1:
            log.warning(
                "%r of namespace %d has other content on node %d: each node reads its own"
                " (`kvfs status` counts such names)",
                path.decode(errors="backslashreplace"),
                namespace_id,
                node,
            )
        self._nodes[name] = node
        if len(self._nodes) > _KNOWN:
            del self._nodes[next(iter(self._nodes))]

    def report(self) -> list[dict[str, Any]]:
        """Returns the last ones, for the node's status."""
        last = list(self._nodes.items())[-_SHOWN:]
        return [
            {
                "namespace": name.namespace_id,
                "path": name.path.decode(errors="backslashreplace"),
                "node": node,
            }
            for name, node in last
        ]
