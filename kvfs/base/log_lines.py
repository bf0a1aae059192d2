"""How a node and its workers write their logs: a message is one line, whatever names are in it.

A file's name may hold line feeds, and who chooses it could write lines of their own into the log.
"""

import logging

from kvfs.base.printable import printable


class LineFormatter(logging.Formatter):
    """Log lines in printable characters. Tracebacks keep their lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 -- logging's name
        return printable(super().formatMessage(record))


def begin(level: str, origin: str = "") -> None:
    """Write to standard error from now on; `origin` says which process of several writes."""
    # What a full disk does not take is dropped: a traceback for each line would fill it again.
    logging.raiseExceptions = False
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(f"%(asctime)s %(levelname)s {origin}%(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
