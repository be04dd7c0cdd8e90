"""torch.distributed processes for tests, over gloo on the CPU, which stay alive for many cases.

One process imports torch and forks the ranks, which is much cheaper than starting each. A case is a function of a test file,
which every rank imports by its name relative to the root of the tests, or a test that is marked ``on_ranks``. A test cannot
hang: a case ends after PATIENCE, and a collective in it after twice as long.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import importlib
import inspect
import os
import pickle
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .patience import PATIENCE

_PRELOADED = (
    "amp_kernels",
    "torch._dynamo",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.optim.zero_redundancy_optimizer",
    "pytest",
    "hypothesis",
)


@dataclass
class Failure:
    """The result of a failed rank: its traceback, or how it ended."""

    text: str


#: Runs a program as root of a new user namespace, in a network namespace with only a bridge.
_SWITCHED = (
    *("unshare", "--user", "--map-root-user", "--net", "sh", "-ec"),
    'ip link add switch type bridge; ip link set switch up; exec "$@"',
    "sh",
)


def hosts_allowed() -> bool:
    """True if a process may create network namespaces here: Linux with user namespaces, bridges and iproute2."""
    try:
        return subprocess.run([*_SWITCHED, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


class Ranks:
    """Process groups of several sizes. Each is forked for its first case, and again after a failed one.

    Args:
        hosts: run each rank in its own network namespace, connected to a bridge by ``eth0``.
    """

    def __init__(self, hosts: bool = False):
        self._hosts = hosts
        self._folder = tempfile.TemporaryDirectory(prefix="ranks")
        self._process: subprocess.Popen | None = None
        self._forks = 0
        self._worlds: dict[int, dict[int, tuple[int, Connection]]] = {}  # by size: process and connection of each rank

    def run(self, work: Callable[..., Any], *args: Any, world: int = 4) -> list[Any]:
        """Call ``work(*args)`` on each rank and return their results.

        Args:
            work: a module-level function.
            world: number of ranks.

        Raises:
            AssertionError: a rank failed; the message has the tracebacks.
        """
        found = self.outcomes(work, *args, world=world)
        failed = [f"rank {rank}:\n{it.text}" for rank, it in enumerate(found) if isinstance(it, Failure)]
        assert not failed, "\n".join(failed)
        return found

    def outcomes(self, work: Callable[..., Any], *args: Any, world: int = 4) -> list[Any]:
        """Like :meth:`run`, with a :class:`Failure` for each failed rank."""
        if world not in self._worlds:
            self._worlds[world] = self._fork(world)
        root = Path(work.__code__.co_filename).parents[work.__module__.count(".")]
        connections = [connection for _, connection in self._worlds[world].values()]
        for connection in connections:
            connection.send((str(root), work.__module__, work.__qualname__, args))
        deadline = time.monotonic() + PATIENCE
        found = [_receive(connection, deadline - time.monotonic()) for connection in connections]
        if any(isinstance(it, Failure) for it in found):
            self._end(world)
        return found

    def _fork(self, world: int) -> dict[int, tuple[int, Connection]]:
        self._forks += 1
        path = os.path.join(self._folder.name, f"socket{self._forks}")
        if self._process is None:
            root = str(Path(__file__).parents[2])
            program = f"import sys; sys.path.append({root!r}); from {__name__} import _main; _main({self._hosts})"
            command = [sys.executable, "-c", program]
            command = [*_SWITCHED, *command] if self._hosts else command
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        with Listener(path) as listener:
            listener._listener._socket.settimeout(PATIENCE)  # ranks that cannot start must not hang the test
            self._process.stdin.write(f"{world} {path}\n")
            self._process.stdin.flush()
            arrived = [listener.accept() for _ in range(world)]
        of_rank = {}
        for connection in arrived:
            rank, pid = connection.recv()
            of_rank[rank] = pid, connection
        return dict(sorted(of_rank.items()))

    def _end(self, world: int) -> None:
        """Kill its ranks."""
        for pid, connection in self._worlds.pop(world).values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            connection.close()

    def close(self) -> None:
        for world in [*self._worlds]:
            self._end(world)
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait()
            self._process = None
        self._folder.cleanup()


def on_ranks(world: int | str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test that each rank of the fixture ``ranks`` runs.

    Args:
        world: number of ranks, or the name of the test's parameter that is the number.
    """

    def decorated(work: Callable[..., None]) -> Callable[..., None]:
        names = [*inspect.signature(work).parameters]

        @functools.wraps(work)
        def test(ranks: Ranks, **given: Any) -> None:
            size = given[world] if isinstance(world, str) else world
            ranks.run(work, *(given[name] for name in names), world=size)

        test.of_a_rank = work
        asked = dict.fromkeys(["ranks", *names, *([world] if isinstance(world, str) else [])])
        test.__signature__ = inspect.Signature(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in asked
        )
        return test

    return decorated


def _receive(connection: Connection, seconds: float) -> Any:
    try:
        return connection.recv() if connection.poll(max(seconds, 0.5)) else Failure("no answer in time")
    except (EOFError, ConnectionError):
        return Failure("the process ended")


def _values(error: BaseException) -> str:
    """Those of the names in the function whose assertion failed: pytest rewrites no ``assert`` of a rank."""
    if not isinstance(error, AssertionError):
        return ""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return "".join(f"{name} = {repr(value)[:500]}\n" for name, value in frame.f_locals.items())


def _be_a_rank(rank: int, world: int, path: str) -> None:
    """Run cases until the test process exits or a case fails. Exiting closes the sockets on which other ranks may wait."""
    # Longer than a test waits, so that the test reports the hang first.
    limit = datetime.timedelta(seconds=2 * PATIENCE)
    with Client(path) as connection:
        connection.send((rank, os.getpid()))
        dist.init_process_group("gloo", init_method=f"file://{path}.store", rank=rank, world_size=world, timeout=limit)
        while True:
            try:
                root, module, name, args = connection.recv()
            except EOFError:
                return
            try:
                if root not in sys.path:
                    sys.path.insert(0, root)
                torch.manual_seed(0)
                work = getattr(importlib.import_module(module), name)
                result = pickle.dumps(getattr(work, "of_a_rank", work)(*args))
                dist.barrier()
            except BaseException as error:
                connection.send(Failure(traceback.format_exc() + _values(error)))
                return
            connection.send_bytes(result)


def _be_a_host() -> None:
    """Move this process into a network namespace with a link to its parent's bridge."""
    pid, parent = os.getpid(), os.getppid()
    if ctypes.CDLL(None, use_errno=True).unshare(0x40000000):  # CLONE_NEWNET
        raise OSError(ctypes.get_errno(), "unshare")
    address = f"10.{pid >> 16 & 255}.{pid >> 8 & 255}.{pid & 255}"
    for command in (
        f"ip link add eth0 type veth peer name host{pid} netns {parent}",
        f"nsenter --net=/proc/{parent}/ns/net ip link set host{pid} master switch up",
        f"ip address add {address}/8 dev eth0",
        "ip link set eth0 up",
        "ip link set lo up",
    ):
        subprocess.run(shlex.split(command), check=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"


def _main(hosts: bool) -> None:
    for name in _PRELOADED:  # once for all ranks
        with suppress(ImportError):
            importlib.import_module(name)
    torch.set_num_threads(1)
    for request in sys.stdin:  # until the test process exits
        world, path = request.split(" ", 1)
        for rank in range(int(world)):
            if os.fork() == 0:
                if hosts:
                    _be_a_host()
                _be_a_rank(rank, int(world), path.strip())
                os._exit(0)  # do not wait for threads of gloo
    with suppress(ChildProcessError):
        while True:
            os.wait()
