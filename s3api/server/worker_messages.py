"""Messages between the supervisor and a worker, over the worker's standard streams.

The supervisor sends its WorkerPlan as a line of JSON, later REPORT any number of times, and closes
the stream to end the worker, which also ends when the supervisor's process does. The worker answers
READY once, and each REPORT with its Tally as a line of JSON.

A worker that is started after the program was replaced beneath the running node is another
program's: it looks at the version of the plan before anything else.
"""

from typing import Final

import msgspec

READY: Final = b"ready\n"
REPORT: Final = b"report\n"
VERSION: Final = 1
"""The version of all these messages; grows by one when any of them changes."""


class PlanVersion(msgspec.Struct):
    """The part that a plan of any version has."""

    version: int = 0


class WorkerPlan(msgspec.Struct, kw_only=True):
    """The supervisor's plan for a worker."""

    version: int = VERSION
    supervisor: int
    """The process that started the worker, and with which it ends."""
    store: str
    listeners: list[int]
    """Descriptors of listening sockets."""
    domains: list[str]
    region: str
    version_2: bool
    object_ownership: str
    """The object ownership of new buckets."""
    bucket_mode: int
    """Permissions of new buckets' directories."""
    encrypted: bool
    """Whether everything that the store lies on is encrypted."""
    certificate: str = ""
    """PEM files; empty: no TLS."""
    private_key: str = ""
    access_log: str = ""
    """The file to write it to; empty: none."""
    lifecycle_day_s: int
    """Seconds that a day of lifecycle rules lasts."""
    log_delivery_s: int
    """Seconds between the deliveries of buckets' access logs."""
    log_level: str = "INFO"
