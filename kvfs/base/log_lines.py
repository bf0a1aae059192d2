"""The form in which a node and its workers write their logs: a message is one line, whatever names
are in it.

A file's name may hold line feeds, by which its creator could write forged lines into the log.
"""

import logging

from kvfs.base.printable import printable


class LineFormatter(logging.Formatter):
    """Log lines in printable characters. Tracebacks keep their lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 -- logging's name
        return printable(super().formatMessage(record))


def begin(level: str, origin: str = "") -> None:
    """Writes to standard error from now on; `origin` names the writing process among several."""
    # What a full disk does not take is dropped: a traceback for each line would fill it again.
    logging.raiseExceptions = False
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(f"%(asctime)s %(levelname)s {origin}%(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
