"""The form in which a node and its workers write their logs: a message is one line, whatever names
are in it.

A file's name may hold line feeds, by which its creator could write forged lines into the log.

With fields a line is a JSON object: `time` (UTC), `level`, `logger`, `message`, `pid`, `process`
(empty: the daemon) and, where there is one, `exception`. The lines of a service whose output is
systemd's journal begin with their priority (sd-daemon(3)), and leave the time to it. Children find
the form in the environment, as their setting.
"""

import json
import logging
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from kvfs.base.printable import printable

VARIABLE: Final = "KVFS_LOG_FORMAT"
_PRIORITIES: Final = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}
"""The numbers of syslog(3)."""


class LineFormatter(logging.Formatter):
    """Log lines in printable characters. Tracebacks keep their lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 -- logging's name
        return printable(super().formatMessage(record))


class FieldFormatter(logging.Formatter):
    """Log lines that are JSON objects, tracebacks included."""

    def __init__(self, origin: str) -> None:
        super().__init__()
        self._origin = origin

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
            "process": self._origin,
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class PriorityFormatter(logging.Formatter):
    """Log lines of another formatter, each with its priority for the journal."""

    def __init__(self, lines: logging.Formatter) -> None:
        super().__init__()
        self._lines = lines

    def format(self, record: logging.LogRecord) -> str:
        mark = f"<{_PRIORITIES.get(record.levelname, 6)}>"
        return mark + self._lines.format(record).replace("\n", f"\n{mark}")


def begin(level: str, origin: str = "") -> None:
    """Writes to standard error from now on, in the form that the environment names; `origin` names
    the writing process among several."""
    # What a full disk does not take is dropped: a traceback for each line would fill it again.
    logging.raiseExceptions = False
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(origin, is_journal=is_journal(sys.stderr.fileno(), os.environ)))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def formatter(origin: str, *, is_journal: bool) -> logging.Formatter:
    """Returns the form in which this process writes."""
    lines: logging.Formatter
    if os.environ.get(VARIABLE) == "json":
        lines = FieldFormatter(origin.strip())
    else:
        time = "" if is_journal else "%(asctime)s "
        lines = LineFormatter(f"{time}%(levelname)s {origin}%(name)s: %(message)s")
    return PriorityFormatter(lines) if is_journal else lines


def is_journal(fd: int, environ: Mapping[str, str]) -> bool:
    """Returns whether what is written there goes to systemd's journal, which says so by the file's
    number (systemd.exec(5))."""
    try:
        found = os.fstat(fd)
    except OSError:
        return False
    return environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"
