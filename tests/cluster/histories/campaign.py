"""Random operations from several hosts by all ways, under faults, all drawn from one seed; what
came of them is judged in the end.

Five kinds of names: `files` are put and written in place, `moves` are renamed too, `new` ones are
made by many at once, `logs` are appended to, and those in `homes` are written in a directory that
is made and removed. Each directory is judged by itself, and has so few operations that this is
quick.
"""

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from s3api.auth.credentials import Credentials
from tests.cluster.cluster import S3_PORT, Cluster, Host
from tests.cluster.histories.events import Disturbance, Hangs, History
from tests.cluster.histories.faults import WAYS, Fault, faults_of
from tests.cluster.histories.fronts import ByClient, ByS3, Front, Mount
from tests.cluster.histories.models import Violation, check_appended, check_cache, check_strict
from tests.cluster.histories.values import values_of
from tests.cluster.stacks import stacks_of
from tests.cluster.waiting import join_all, wait_until

_PAUSE_S: Final = 0.03
"""After an operation that failed: else a host that is cut off fills the history."""
_GIVE_UP_S: Final = 120.0
_CALM_S: Final = 90.0
"""Within which all is readable again, after the last fault."""
_FRONTS: Final = 3
"""Mount, client, S3: a worker for each."""
_LOGS: Final = 2
_NEW_EACH: Final = 6
"""Operations of a worker before it goes on to the next new name."""


@dataclass(frozen=True)
class Plan:
    """How much, and how bad."""

    seed: int
    namespace: str
    """Or a directory in one."""
    operations: int = 120
    """Of each worker, at most."""
    directories: int = 5
    """Of files, and of moves."""
    faults: int = 3
    fault_s: tuple[float, float] = (0.5, 3.0)
    """How long one lasts: drawn from between."""
    with_moves: bool = True
    """Whether names move and are made exclusively: a cache promises nothing of these."""
    with_stops: bool = True
    """Whether nodes stand still for a while: a cache is later then, by as long as that lasts."""
    further_faults: Callable[[Host], Sequence[Fault]] = lambda _host: ()
    """More of what may happen to a host."""


class Campaign:
    """Run once, on a cluster that is up, serves S3 and has the namespace."""

    def __init__(self, cluster: Cluster, keys: Credentials, plan: Plan) -> None:
        self.history = History()
        self.disturbances: list[Disturbance] = []
        self._cluster = cluster
        self._keys = keys
        self._plan = plan
        self._stop = threading.Event()
        self._errors: list[BaseException] = []
        self._logs = [f"logs-{n}" for n in range(_LOGS)] if plan.with_moves else []
        kinds = ("files", "moves") if plan.with_moves else ("files",)
        self._homes = [f"homes-{n}" for n in range(plan.directories if plan.with_moves else 0)]
        self._directories = [f"{kind}-{n}" for kind in kinds for n in range(plan.directories)]

    # ---- all of it

    def run(self) -> History:
        """Raises what a worker raised; Hangs; TimeoutError where it does not calm down."""
        self._prepare()
        workers = [
            threading.Thread(target=self._work, args=(host, number), daemon=True)
            for host in self._cluster
            for number in range(_FRONTS)
        ]
        for worker in workers:
            worker.start()
        try:
            self._be_bad(workers)
        finally:
            self._stop.set()
            self._await(workers, _GIVE_UP_S)
        self.look_at_all()
        return self.history

    def _await(self, threads: list[threading.Thread], timeout_s: float) -> None:
        """Until all have ended. Raises Hangs, what one of them raised."""
        if not join_all(threads, timeout_s):
            what = self.history.hanging() or [
                thread.name for thread in threads if thread.is_alive()
            ]
            raise Hangs("\n".join(["never ends:", *what, stacks_of(self._cluster)]))
        if self._errors:
            raise self._errors[0]

    def _prepare(self) -> None:
        """All directories are there, on all hosts."""
        first = self._root(self._cluster[1])
        news = -(-self._plan.operations // _NEW_EACH) if self._plan.with_moves else 0
        above = (*self._logs, *self._homes, *(f"new-{n}" for n in range(news)))
        for name in (*above, *self._directories):
            (first / name).mkdir()
        for host in self._cluster:
            wait_until((self._root(host) / self._directories[-1]).is_dir, "all hosts see it")

    def check_strict(self) -> None:
        check_strict(self.history.events)
        for host in self._cluster:
            for name in self._logs:
                path = self._root(host) / name / "a"
                lines = values_of(path.read_bytes()) if path.exists() else []
                check_appended(self.history.events, f"{name}/a", lines)

    def check_cache(self, bound_s: float) -> None:
        check_cache(self.history.events, bound_s)

    def _root(self, host: Host) -> Path:
        return host.mount / self._plan.namespace

    # ---- faults

    def _be_bad(self, workers: list[threading.Thread]) -> None:
        """One fault after the other, with pauses, while somebody works."""
        draw = random.Random(f"{self._plan.seed} faults")
        for _ in range(self._plan.faults):
            self._wait(draw.uniform(0.3, 1.0), workers)
            fault, began = draw.choice(self._faults(draw)), time.monotonic()
            print(f"{began:.4f} {fault.name}")
            try:
                fault.begin()
                self._wait(draw.uniform(*self._plan.fault_s), workers)
            finally:
                fault.end()
            ended = time.monotonic()
            self.disturbances.append(
                Disturbance(began, ended, fault.hosts, fault.empties, fault.name)
            )
            print(f"{ended:.4f} {fault.name}: over")
        join_all(workers, _GIVE_UP_S)

    def _wait(self, seconds: float, workers: list[threading.Thread]) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(worker.is_alive() for worker in workers):
            time.sleep(0.02)

    def _faults(self, draw: random.Random) -> list[Fault]:
        host, ways = draw.choice(list(self._cluster)), draw.choice(WAYS)
        faults = faults_of(self._cluster, host, ways, with_stops=self._plan.with_stops)
        return [*faults, *self._plan.further_faults(host)]

    # ---- work

    def _work(self, host: Host, number: int) -> None:
        """One worker has the mount, one the client, one S3."""
        name = f"{self._plan.seed} {host.number} {number}"
        draw = random.Random(name)
        values = (((host.number * 4 + number) << 20) + n for n in range(1, 1 << 20))
        try:
            with self._front(host, number) as front:
                for turn in range(self._plan.operations):
                    if self._stop.is_set():
                        return
                    self._operate(host, front, draw, turn, values)
                    if self.history.went_wrong:
                        self._stop.wait(_PAUSE_S)
        except BaseException as error:
            self._errors.append(error)

    @contextlib.contextmanager
    def _front(self, host: Host, number: int) -> Iterator[Front]:
        made: Front
        if number == 0:
            made = Mount(self._root(host))
        elif number == 1:
            made = ByClient(host.store, self._plan.namespace)
        else:
            self._cluster.network.enter(host.name)
            endpoint = f"http://{host.address}:{S3_PORT}"
            made = ByS3(endpoint, self._keys, self._plan.namespace)
        try:
            yield made
        finally:
            made.close()

    def _operate(
        self,
        host: Host,
        front: Front,
        draw: random.Random,
        turn: int,
        values: Iterator[int],
    ) -> None:
        kinds = ["files", "moves", "new"] if self._plan.with_moves else ["files"]
        if self._logs and isinstance(front, Mount):
            kinds += ["logs", "homes"]
        kind = draw.choice(kinds)
        if kind == "logs" and isinstance(front, Mount):
            return self._append(host, front, f"{draw.choice(self._logs)}/a", next(values))
        if kind == "homes" and isinstance(front, Mount):
            return self._in_home(host, front, draw, f"{draw.choice(self._homes)}/d", values)
        if kind == "new":
            return self._on_new(host, front, draw, f"new-{turn // _NEW_EACH}/a", values)
        directory = f"{kind}-{draw.randrange(self._plan.directories)}"
        name = f"{directory}/{draw.choice('ab') if kind == 'moves' else 'a'}"
        if draw.random() < 0.5:
            return self._read(host, front, name)
        if draw.random() < 0.2:
            return self._remove(host, front, name)
        if kind == "moves" and draw.random() < 0.5:
            return self._rename(host, front, name)
        self._put(host, front, draw, name, next(values), in_place=kind == "files")
        return None

    def _read(self, host: Host, front: Front, name: str) -> None:
        with self.history.asking(host.number, front.name, "read", name) as answer:
            answer.value = front.read(name)

    def _remove(self, host: Host, front: Front, name: str) -> None:
        action = "drop" if isinstance(front, ByS3) else "remove"
        with self.history.asking(host.number, front.name, action, name):  # type: ignore[arg-type]
            front.remove(name)

    def _rename(self, host: Host, front: Front, name: str) -> None:
        if not isinstance(front, Mount | ByClient):
            return
        other = name[:-1] + ("b" if name.endswith("a") else "a")
        with self.history.asking(host.number, front.name, "rename", name, other=other):
            front.rename(name, other)

    def _put(
        self,
        host: Host,
        front: Front,
        draw: random.Random,
        name: str,
        value: int,
        *,
        in_place: bool,
    ) -> None:
        if in_place and isinstance(front, Mount) and draw.random() < 0.5:
            with self.history.asking(host.number, front.name, "write", name, value):
                front.write(name, value)
            return
        with self.history.asking(host.number, front.name, "put", name, value):
            front.put(name, value)

    def _in_home(
        self, host: Host, front: Mount, draw: random.Random, home: str, values: Iterator[int]
    ) -> None:
        name, value = f"{home}/a", next(values)
        match draw.choice(("mkdir", "write", "write", "read", "remove", "rmdir", "rmdir")):
            case "mkdir":
                with self.history.asking(host.number, front.name, "mkdir", f"{home}/"):
                    front.mkdir(home)
            case "rmdir":
                with self.history.asking(host.number, front.name, "rmdir", f"{home}/"):
                    front.rmdir(home)
            case "write":
                with self.history.asking(host.number, front.name, "write", name, value):
                    front.write_below(name, value)
            case "read":
                self._read(host, front, name)
            case "remove":
                self._remove(host, front, name)

    def _append(self, host: Host, front: Mount, name: str, value: int) -> None:
        with self.history.asking(host.number, front.name, "append", name, value):
            front.append(name, value)

    def _on_new(
        self, host: Host, front: Front, draw: random.Random, name: str, values: Iterator[int]
    ) -> None:
        if draw.random() < 0.5:
            return self._read(host, front, name)
        value = next(values)
        if not isinstance(front, Mount) or draw.random() < 0.5:
            with self.history.asking(host.number, front.name, "put_new", name, value):
                front.put_new(name, value)
            return None
        number = -1
        with self.history.asking(host.number, front.name, "reserve", name, value):
            number = front.reserve(name)
        if number >= 0:
            with self.history.asking(host.number, front.name, "publish", name, value):
                front.publish(number, value)
        return None

    # ---- the end

    def look_at_all(self) -> None:
        """Each host reads each name by each way, as soon as it can; all list the same names.
        Raises TimeoutError, Hangs, Violation."""
        told = [each for each in self.history.events if each.action != "append"]
        names = sorted({each.name for each in told if not each.name.endswith("/")})
        end = time.monotonic() + _CALM_S
        lists: dict[int, list[str]] = {}
        threads = [
            threading.Thread(target=self._look, args=(host, names, end, lists), daemon=True)
            for host in self._cluster
        ]
        for thread in threads:
            thread.start()
        self._await(threads, _CALM_S + _GIVE_UP_S)
        if self._plan.with_moves and len(set(map(tuple, lists.values()))) > 1:
            raise Violation(self._differing(lists))

    def _differing(self, lists: dict[int, list[str]]) -> str:
        """The names that not all hosts list, and what was done to each."""
        told = []
        for name in sorted(set().union(*lists.values())):
            listing = [host for host, names in lists.items() if name in names]
            if len(listing) < len(lists):
                of_it = [each for each in self.history.events if name in (each.name, each.other)]
                told += [f"{name} is listed by hosts {listing}:", *map(str, of_it)]
        return "\n".join(["hosts list different names", *told])

    def _look(self, host: Host, names: list[str], end: float, lists: dict[int, list[str]]) -> None:
        """In a thread of its own, which enters the host."""
        try:
            for number in range(_FRONTS):
                with self._front(host, number) as front:
                    for name in names:
                        self._read_at_last(host, front, name, end)
            lists[host.number] = self._listed(host)
        except BaseException as error:
            self._errors.append(error)

    def _read_at_last(self, host: Host, front: Front, name: str, end: float) -> None:
        while True:
            before = len(self.history.events)
            self._read(host, front, name)
            if len(self.history.events) > before:
                return
            if time.monotonic() > end:
                failures = self.history.failures
                raise TimeoutError(f"no {name} by {front.name} of host {host.number}: {failures}")
            time.sleep(0.1)

    def _listed(self, host: Host) -> list[str]:
        root = self._root(host)
        return sorted(
            str(path.relative_to(root))
            for directory in root.iterdir()
            if directory.is_dir()
            for path in directory.iterdir()
        )
