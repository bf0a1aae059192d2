"""Where processes stand: for an operation that never ends, whose node runs still."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from tests.cluster.cluster import Cluster
from tests.cluster.waiting import name_of

_FUNCTIONS: Final = 6
"""Of the kernel, innermost first: which lock or answer a thread waits for."""
_CONNECTIONS: Final = Path("/sys/fs/fuse/connections")


def stacks_of(cluster: Cluster) -> str:
    """The threads of the processes of each host and of this one, and the requests that mounts have
    not answered. Only root sees the functions of the kernel."""
    told = []
    for host in cluster:
        told += [f"---- host {host.number}", *_processes(cluster.network.processes(host.name))]
    told += ["---- this process and its children", *_processes([os.getpid(), *_children()])]
    told += ["---- connections with requests that wait", *_waiting()]
    return "\n".join(told)


def _processes(pids: Iterable[int]) -> Iterator[str]:
    for pid in pids:
        yield f"{pid}: {name_of(pid)}"
        yield from _threads(Path(f"/proc/{pid}/task"))


def _threads(tasks: Path) -> Iterator[str]:
    """Nothing, or a part, where it ends meanwhile."""
    try:
        for task in sorted(tasks.iterdir()):
            name = (task / "comm").read_text().strip()
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            yield f"  {task.name} {name} {state} {_kernel_stack(task)}"
    except OSError as error:
        yield f"  {error}"


def _kernel_stack(task: Path) -> str:
    try:
        lines = (task / "stack").read_text().splitlines()
    except PermissionError:
        return (task / "wchan").read_text()
    return " < ".join(line.split()[-1].partition("+")[0] for line in lines[:_FUNCTIONS])


def _children() -> Iterator[int]:
    for task in Path("/proc/self/task").iterdir():
        yield from map(int, (task / "children").read_text().split())


def _waiting() -> Iterator[str]:
    try:
        for connection in sorted(_CONNECTIONS.iterdir()):
            count = (connection / "waiting").read_text().strip()
            if count != "0":
                yield f"{connection.name}: {count}"
    except OSError as error:
        yield str(error)
