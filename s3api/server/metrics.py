"""The metrics in Prometheus' text format: the counts of the workers, and the node's own state.

Workers tell their counts over the pipe that they have anyway: counting is plain addition there, no
files must be shared and none are left by a kill. prometheus_client is imported on request.
"""

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from s3api.server.counters import BOUNDS_S, Flow, Tally

if TYPE_CHECKING:
    from prometheus_client import Metric

CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"
_PLACE: Final = ("operation", "bucket")


def exposition(status: dict[str, Any], tally: Tally | None) -> bytes:
    """Returns the whole page: `status` is the node's, `tally` the workers' (None: S3 is off)."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.registry import Collector

    class StatusCollector(Collector):
        def collect(self) -> Iterable["Metric"]:
            yield from _of_node(status)
            if (cluster := status.get("cluster")) is not None:
                yield from _of_cluster(cluster, status["engine"])
            if (nfs := status.get("nfs")) is not None:
                yield from _of_nfs(nfs)
            if (backup := status.get("backup")) is not None:
                yield from _of_backups(backup)
            if tally is not None:
                yield from _of_workers(status, tally)

    registry = CollectorRegistry()
    registry.register(StatusCollector())
    return generate_latest(registry)


def _of_backups(backup: dict[str, Any]) -> Iterator["Metric"]:
    last = backup["last"]
    text = "Time of the newest backup, since the epoch; 0: none is known."
    yield _gauge("kvfs_backup_time_seconds", text, last["made_ns"] / 1e9 if last else 0)
    text = "Whether the last attempt to make a backup failed."
    yield _gauge("kvfs_backup_failed", text, int(backup["problem"] is not None))


def _of_node(status: dict[str, Any]) -> Iterator["Metric"]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    yield _gauge("kvfs_up_seconds", "Since the node was started.", status["uptime_s"])
    yield _gauge("kvfs_resident_bytes", "Memory of the daemon.", status["rss_bytes"])
    yield _gauge("kvfs_mounted", "Whether the node has a mount.", int(status["mount"] is not None))
    failed = int(status["engine"]["journal_failure"] is not None)
    text = "What the metadata take of the store's disk; in no capacity."
    yield _gauge("kvfs_metadata_bytes", text, status["engine"]["bytes"])
    yield _gauge("kvfs_journal_failed", "Whether the disk refused a sync: fsync fails.", failed)
    damaged = len(status["engine"]["damaged_metadata"])
    text = "Journals and bases that a start found damaged, until removed."
    yield _gauge("kvfs_damaged_metadata", text, damaged)
    left = status["engine"]["reserve_left"]
    yield _gauge("kvfs_metadata_reserve", "Left of what is kept for a full disk; 1: all.", left)
    files = status["descriptors"]
    yield _gauge("kvfs_open_files", "Open files of the mount.", files["files"])
    yield _gauge("kvfs_open_files_most", "How many users may have open.", files["most_files"])
    space = GaugeMetricFamily("kvfs_store_bytes", "Space of the store.", labels=["kind"])
    for kind in ("used", "free", "capacity"):
        space.add_metric([kind], status["store"][f"{kind}_bytes"])
    yield space
    quarantine = status["quarantine"]
    yield _gauge(
        "kvfs_quarantine_files", "Data files in quarantine, until emptied.", quarantine["files"]
    )
    yield _gauge("kvfs_quarantine_bytes", "Space that these use.", quarantine["used_bytes"])
    for name, text in (
        ("used_bytes", "Space that a namespace uses."),
        ("capacity_bytes", "Its limit; 0: the store's own."),
        ("inodes", "Files and directories in it."),
    ):
        family = GaugeMetricFamily(f"kvfs_namespace_{name}", text, labels=["namespace"])
        for each in status["namespaces"]:
            family.add_metric([each["name"]], each[name] or 0)
        yield family
    events = CounterMetricFamily(
        "kvfs_events", "What the node counts, by name: evictions, seals, refusals.", labels=["name"]
    )
    for name, value in status["counters"].items():
        events.add_metric([name], value)
    yield events
    misses = CounterMetricFamily(
        "kvfs_misses", "What was looked for and is not there.", labels=["door", "reason"]
    )
    for door, counts in status["misses"].items():
        for reason, count in counts.items():
            misses.add_metric([door, reason], count)
    yield misses


def _of_cluster(cluster: dict[str, Any], engine: dict[str, Any]) -> Iterator["Metric"]:
    """Yields this node's metrics of its engine and of the other nodes."""
    from prometheus_client.core import GaugeMetricFamily

    if (expires_s := cluster["tls"]["certificate_expires_s"]) is not None:
        text = "Time when the certificate for other nodes ends, since the epoch; made anew daily."
        yield _gauge("kvfs_cluster_certificate_expires_seconds", text, expires_s)
    held = int(cluster["holds_lease"])
    yield _gauge("kvfs_cluster_lease_held", "Whether this node may serve others.", held)
    yield _gauge("kvfs_engine_position", "The last commit that is known here.", engine["position"])
    full = int(engine["is_full"])
    yield _gauge("kvfs_engine_full", "Whether the engine's memory is full.", full)
    refused = int(engine["mirror_refusal"] is not None)
    text = "Whether the disk of the metadata replica refuses what others commit."
    yield _gauge("kvfs_mirror_refused", text, refused)
    yield _gauge("kvfs_engine_silent_seconds", "Since it was heard last.", engine["silent_s"])
    text = "Whether it is away: strict namespaces are read as they were, changes are refused."
    yield _gauge("kvfs_engine_away", text, int(engine["is_away"]))
    yield _counter("kvfs_engine_requests", "Sent to the engine.", engine["round_trips"])
    text = "Closed here; before others were told, they lost their names or their directories."
    yield _counter("kvfs_unplaced_files", text, engine["unplaced_files"])
    families = {
        "alive": "Whether a node holds its lease.",
        "capacity_bytes": "What a node lends.",
        "free_bytes": "What of it is free.",
        "lacking_files": "Files that lack copies which it is to have made.",
    }
    for name, text in families.items():
        family = GaugeMetricFamily(f"kvfs_cluster_node_{name}", text, labels=["node", "state"])
        for each in cluster["nodes"]:
            value = each["lease"] == "held" if name == "alive" else each[name]
            family.add_metric([each["name"], each["state"]], int(value))
        yield family


def _of_nfs(nfs: dict[str, Any]) -> Iterator["Metric"]:
    yield _gauge("kvfs_nfs_serving", "Whether NFS is served.", int(nfs["is_serving"]))
    yield _gauge("kvfs_nfs_exports", "Namespaces that are exported.", len(nfs["exports"]))
    failed = sum(bool(each["problem"]) for each in nfs["exports"])
    yield _gauge("kvfs_nfs_failed_exports", "Those among them that are not served.", failed)
    yield _gauge("kvfs_nfs_clients", "Hosts that have a connection.", nfs["clients"])
    yield _gauge("kvfs_nfs_open_connections", "Their connections.", nfs["connections"])
    yield _counter("kvfs_nfs_restarts", "Dead servers replaced.", nfs["restarts"])


def _of_workers(status: dict[str, Any], tally: Tally) -> Iterator["Metric"]:
    from prometheus_client.core import CounterMetricFamily

    s3 = status.get("s3") or {}
    if (expires_s := s3.get("certificate_expires_s")) is not None:
        text = "Time when the certificate of S3 ends, since the epoch."
        yield _gauge("kvfs_s3_certificate_expires_seconds", text, expires_s)
    yield _gauge("kvfs_s3_workers", "Workers that run.", len(s3.get("workers", ())))
    yield _counter("kvfs_s3_worker_restarts", "Dead workers replaced.", s3.get("restarts", 0))
    yield _gauge("kvfs_s3_open_connections", "Connections now.", tally.open_connections)
    waiting = tally.waiting_connections
    yield _gauge("kvfs_s3_waiting_connections", "Connections that wait for others.", waiting)
    yield _counter("kvfs_s3_connections", "Connections accepted.", tally.connections)
    yield _counter("kvfs_s3_refused", "Answers to what was no proper request.", tally.refused)
    yield _counter("kvfs_s3_cut", "Responses that did not go out whole.", tally.failed)
    requests = CounterMetricFamily(
        "kvfs_s3_requests", "Requests answered, by status.", labels=[*_PLACE, "status"]
    )
    errors = CounterMetricFamily("kvfs_s3_errors", "Errors told.", labels=[*_PLACE, "code"])
    received = CounterMetricFamily("kvfs_s3_received_bytes", "Bodies received.", labels=_PLACE)
    sent = CounterMetricFamily("kvfs_s3_sent_bytes", "Responses sent.", labels=_PLACE)
    for flow in tally.flows:
        place = [flow.operation, flow.bucket]
        for status_code, count in sorted(flow.statuses.items()):
            requests.add_metric([*place, str(status_code)], count)
        for code, count in sorted(flow.errors.items()):
            errors.add_metric([*place, code], count)
        received.add_metric(place, flow.received_bytes)
        sent.add_metric(place, flow.sent_bytes)
    yield from (requests, errors, received, sent, _latency(tally.flows))


def _latency(flows: Iterable[Flow]) -> "Metric":
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(
        "kvfs_s3_seconds", "From a request's head to the last byte of its answer.", labels=_PLACE
    )
    bounds = [*(str(bound) for bound in BOUNDS_S), "+Inf"]
    for flow in flows:
        counts = zip(bounds, accumulate(flow.classes), strict=True)
        family.add_metric([flow.operation, flow.bucket], list(counts), flow.seconds)
    return family


def _gauge(name: str, text: str, value: float) -> "Metric":
    from prometheus_client.core import GaugeMetricFamily

    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> "Metric":
    from prometheus_client.core import CounterMetricFamily

    return CounterMetricFamily(name, text, value=value)
