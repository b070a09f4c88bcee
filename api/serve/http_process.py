"""The server's process from its first line to its last: listen, load, serve, drain, end.

The port answers from the beginning: that the model is loading is an answer, too. SIGTERM and Ctrl-C end it in order:
it is not ready any more, new requests are turned away, and those that run are answered, for some time at most. Then, or
at a second signal, they are told that they are cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
import uvloop

from precast.ir.errors import PrecastError, TargetError
from precast.serve.app import App, Options
from precast.serve.defaults import defaults_of
from precast.serve.link import Link
from precast.serve.messages import Load
from precast.serve.prompts import Prompts

LOOKS_SECONDS = 0.05
"""How often a server that is to end looks whether the last answer has."""
TELLS_SECONDS = 1.0
"""For which clients whose answers are cut off may take to be told so."""
MOST_FILES = 1 << 16
"""Descriptors that a server asks the system for: each connection is one."""


def serve(
    load: Load, options: Options, *, host: str, port: int, shutdown_seconds: float, say: Callable[[str, str], None]
) -> None:
    """Serve until a signal comes; answers have `shutdown_seconds` to end then.

    `say` is called with an event's name and what there is to say: `listening` with the address, `ready` with the
    seconds that the load took, `draining` with the number of answers that run, `cutting` with that of requests whose
    answers don't end.

    Raises what ends the engine: BundleError, WeightsError and others of `precast.load`, TargetError (`engine-failed`);
    and TargetError (`port-taken`, `host-unknown`) where it can't listen.
    """
    _allow_files()
    with _listening(host, port) as listener:
        say("listening", _address(listener))
        uvloop.run(_serve(listener, load, options, shutdown_seconds, say))


async def _serve(
    listener: socket.socket, load: Load, options: Options, shutdown_seconds: float, say: Callable[[str, str], None]
) -> None:
    link = Link()
    app = App(link, options)
    config = uvicorn.Config(
        app, log_level="error", access_log=False, lifespan="off", ws="none", server_header=False,
        timeout_graceful_shutdown=2, timeout_keep_alive=75,
    )  # fmt: skip
    server = _Server(config, app, link, shutdown_seconds, say)
    engine = asyncio.ensure_future(asyncio.gather(link.run(load), _prepare(link, app, say)))
    http = asyncio.create_task(server.serve(sockets=[listener]))
    await asyncio.wait((engine, http), return_when=asyncio.FIRST_COMPLETED)
    server.end()
    await http
    await link.close(at_once=server.force_exit or server.cuts)
    engine.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await engine
    if link.failed is not None:
        raise link.failed


async def _prepare(link: Link, app: App, say: Callable[[str, str], None]) -> None:
    """Read the tokenizer while the weights are read, and say when all is there. Raises BundleError."""
    async with link.changed:
        await link.changed.wait_for(lambda: link.opened or link.failed)
    if link.opened is None:
        return
    app.defaults = defaults_of(link.opened.files)
    prompts = await asyncio.to_thread(Prompts, link.opened.files, link.opened.model)
    async with link.changed:
        await link.changed.wait_for(lambda: link.ready or link.failed)
    if link.ready is not None and link.failed is None:
        app.prompts = prompts
        say("ready", f"{link.ready.seconds:.2f}")


class _Server(uvicorn.Server):
    """uvicorn's server, which answers before it ends. `cuts`: it ends before all answers have."""

    def __init__(
        self, config: uvicorn.Config, app: App, link: Link, shutdown_seconds: float, say: Callable[[str, str], None]
    ) -> None:
        super().__init__(config)
        self.cuts = False
        self._app = app
        self._link = link
        self._shutdown_seconds = shutdown_seconds
        self._say = say
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: the first drains, the second cuts off, and the third waits for nothing."""
        if self.cuts:
            self.end(at_once=True)
        elif self._app.drains:
            self.cuts = True
        else:
            self._app.drains = True
            asyncio.get_running_loop().call_soon_threadsafe(self._drain)

    def end(self, *, at_once: bool = False) -> None:
        """Answer nothing more. What is cut off now is no error for the log."""
        logging.getLogger("uvicorn.error").disabled = True
        self.force_exit = self.force_exit or at_once
        self.should_exit = True

    def _drain(self) -> None:
        self._draining = asyncio.create_task(self._end_after_the_last())

    async def _end_after_the_last(self) -> None:
        places, loop = self._app.places, asyncio.get_running_loop()
        until = loop.time() + self._shutdown_seconds
        self._tell("draining", places.num_open)
        while places.num_unsent and loop.time() < until and not self.cuts:
            await asyncio.sleep(LOOKS_SECONDS)
        if places.num_unsent:
            self.cuts = True
            self._tell("cutting", places.num_unsent)
            self._link.cut_off()
            until = loop.time() + TELLS_SECONDS
            while places.num_unsent and loop.time() < until:
                await asyncio.sleep(LOOKS_SECONDS)
            await asyncio.sleep(LOOKS_SECONDS)  # a place is left just before the last is sent
        self.end(at_once=places.num_unsent > 0)

    def _tell(self, event: str, number: int) -> None:
        with contextlib.suppress(OSError, PrecastError):  # whoever read what it says may have gone
            self._say(event, str(number))


def _allow_files() -> None:
    """Raise the limit of descriptors, where the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft not in (resource.RLIM_INFINITY, hard) and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises TargetError (`port-taken`, `host-unknown`) where it can't."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        is_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        raise TargetError(
            "host-unknown" if is_host else "port-taken",
            f"the server can't listen on port {port} of {host}: {error.strerror}",
            fix="give an address of this machine as --host" if is_host else "give another --port, or another --host",
        ) from None
    listener.setblocking(False)
    return listener


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
