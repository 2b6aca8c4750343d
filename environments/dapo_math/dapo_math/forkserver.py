"""A fork server of this package's own: its workers start in milliseconds and never import the caller's main module.

Python's shared fork server may have been started by the application, without our preload, and a child of `os.fork`
inherits a handle on it that does not work.
"""

import io
import multiprocessing.context as context
import os
from multiprocessing import forkserver, popen_forkserver, process, reduction, spawn, util
from typing import Any

_server = forkserver.ForkServer()


def preload(module: str) -> None:
    """Have the server import `module` once, before its first worker."""
    _server.set_forkserver_preload([module])


def forget() -> None:
    """In a forked child: let go of the parent's server and workers, so that they end with the parent alone."""
    global _server
    inherited, _server = _server, forkserver.ForkServer()
    _server.set_forkserver_preload(inherited._preload_modules)  # pyright: ignore[reportAttributeAccessIssue]
    if (alive := inherited._forkserver_alive_fd) is not None:  # pyright: ignore[reportAttributeAccessIssue]
        os.close(alive)
    for inherited_worker in [child for child in process._children if isinstance(child, Process)]:  # pyright: ignore
        process._children.discard(inherited_worker)  # pyright: ignore[reportAttributeAccessIssue]


class _Popen(popen_forkserver.Popen):
    _fds: list[int]

    def _launch(self, process_obj: Any) -> None:
        # As in the base class, but on our server, and without the caller's main module, which may be heavy.
        preparation = spawn.get_preparation_data(process_obj._name)
        preparation.pop("init_main_from_name", None)
        preparation.pop("init_main_from_path", None)
        message = io.BytesIO()
        context.set_spawning_popen(self)  # pyright: ignore[reportArgumentType]
        try:
            reduction.dump(preparation, message)
            reduction.dump(process_obj, message)
        finally:
            context.set_spawning_popen(None)
        self.sentinel, data_w = _server.connect_to_new_process(self._fds)
        parent_w = os.dup(data_w)  # its closing tells the worker that the parent is gone
        closing = util.close_fds  # pyright: ignore[reportAttributeAccessIssue]
        self.finalizer = util.Finalize(self, closing, (parent_w, self.sentinel))
        with open(data_w, "wb") as file:
            file.write(message.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)  # pyright: ignore[reportAttributeAccessIssue]


class Process(context.ForkServerProcess):
    """A process that this module's server forks."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _Popen(process_obj)


class Context(context.ForkServerContext):
    """A multiprocessing context whose processes come from this module's server."""

    Process = Process
