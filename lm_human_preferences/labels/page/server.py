"""The page's server, in a thread of its own."""

from __future__ import annotations

import asyncio
import io
import ipaddress
import os
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from typing import Any

import uvicorn

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.labelling_options import WebHParams
from lm_human_preferences.labels.folder import LabelFolder
from lm_human_preferences.labels.labeller import check_name
from lm_human_preferences.labels.page.access import Access
from lm_human_preferences.labels.page.app import make_app
from lm_human_preferences.labels.page.assignments import LEASE_SECONDS
from lm_human_preferences.labels.page.connections import LimitedLoop, TimedProtocol
from lm_human_preferences.labels.page.key import folder_key
from lm_human_preferences.labels.page.service import LabellingService
from lm_human_preferences.runs.run_files import TASK

MOST_CONNECTIONS = 500
MOST_HEADER_BYTES = 16 * 1024
GRACE_SECONDS = 3  # for replies that are under way when the server ends


class LabelServer:
    """Serves a folder's page to its labellers from when it is made until it is closed.

    It runs in a thread and needs no torch, so that a command may wait for Ctrl-C meanwhile, and a
    training may train. links: {labeller: URL to be opened in a browser}; they stay valid for the
    next server of the folder. options: where it is served, and with which files for TLS. note: is
    called with lines for who started it, from any thread. UserError for what cannot be served.
    """

    def __init__(
        self,
        folder: str,
        labellers: Sequence[str],
        options: WebHParams,
        *,
        lease_seconds: float = LEASE_SECONDS,
        note: Callable[[str], None] = print,
    ) -> None:
        for name in labellers:
            check_name(name)
        opened = LabelFolder(folder)
        self._error: BaseException | None = None
        self._note = note
        self._lock = _locked(folder)
        try:
            secret = folder_key(folder)
            for line in secret.notes:
                note(line)
            self.service = LabellingService(opened, labellers, secret, lease_seconds, note)
        except BaseException:
            self._lock.close()
            raise
        try:
            self._listener = _listen(options)
            self._start(options, Access(secret, labellers))
        except BaseException:
            self._release()
            raise

    def _start(self, options: WebHParams, access: Access) -> None:
        scheme = 'http' if options.certificate is None else 'https'
        name = socket.gethostname() if is_wildcard(options.host) else options.host
        ending = asyncio.Event()
        app = make_app(self.service, access, [_in_url(name)], ending, scheme=scheme)
        self.port: int = self._listener.getsockname()[1]
        self.url = f'{scheme}://{_in_url(name)}:{self.port}'
        self.links = {name: f'{self.url}/#{access.token(name)}' for name in access.labellers}
        try:
            self._server = _Server(_config(app, options.certificate, options.key), ending)
            self._server.config.load()
        except OSError as e:  # ssl.SSLError, too
            reason = e.reason if isinstance(e, ssl.SSLError) else e.strerror
            self._listener.close()
            certificate, key = options.setting('certificate'), options.setting('key')
            raise UserError(
                f'{certificate} with {key}: {reason or e}; both must be PEM files that belong'
                ' together'
            ) from e
        self._thread = threading.Thread(target=self._run, name='label server', daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: LimitedLoop(self._note)) as runner:
                runner.run(self._server.serve(sockets=[self._listener]))
        except BaseException as e:
            self._error = e

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the server has ended, at most so long; re-raises what ended it."""
        self._thread.join(seconds)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Answer what has been asked, and end; what was acknowledged is on the disk."""
        self._server.should_exit = True
        self._thread.join()
        self._release()

    def _release(self) -> None:
        self.service.close()
        self._lock.close()

    def __enter__(self) -> LabelServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(uvicorn.Server):
    """A server that sets `ending` when it ends, for pages that wait to be told."""

    def __init__(self, config: uvicorn.Config, ending: asyncio.Event) -> None:
        super().__init__(config)
        self._ending = ending

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what has been asked, and accept no more."""
        self._ending.set()
        await super().shutdown(sockets)


def _locked(folder: str) -> io.FileIO:
    """A file of the folder, locked until it is closed; UserError if another server has it.

    It is one that nobody deletes: without it the folder is none.
    """
    path = os.path.join(folder, TASK)
    # Some shared disks lock for those only who may write.
    mode = 'rb+' if os.access(path, os.W_OK) else 'rb'
    try:
        file = open(path, mode, buffering=0, opener=storage.open_nofollow)
    except OSError as e:
        raise UserError(f'{path} cannot be used: {e.strerror or e}') from e
    try:
        storage.lock_file(file)
    except BlockingIOError:
        file.close()
        raise UserError(
            f'{folder} has a page already: name all labellers where it was started'
        ) from None
    return file


def is_wildcard(host: str) -> bool:
    """Whether a host stands for all addresses of this machine."""
    return host in ('0.0.0.0', '::')


def is_local(host: str) -> bool:
    """Whether nobody but this machine can reach a host."""
    if host == 'localhost':
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def missing_tls(options: WebHParams) -> str | None:
    """A warning where others can reach the host and what is sent is not encrypted."""
    if options.certificate is not None or is_local(options.host):
        return None
    certificate, key = options.option_name('certificate'), options.option_name('key')
    return (
        f'warning: there is no TLS: whoever is between you and {options.host} can read the links,'
        f' and answer as anybody; give {certificate} and {key}, or leave'
        f' {options.option_name("host")} out and use ssh -L'
    )


def _listen(options: WebHParams) -> socket.socket:
    """A socket that listens where `options` say; UserError if that cannot be."""
    host, port = options.host, options.port
    try:
        ((family, _, _, _, address), *_) = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as e:
        raise UserError(
            f'{options.option_name("host")} {host!r:.80} is no address of this machine: {e}'
        ) from e
    try:
        listener = socket.create_server(address[:2], family=family, backlog=MOST_CONNECTIONS)
        # Connections inherit it. Without, the body of a reply would wait for the acknowledgement of
        # its head, which takes 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as e:
        name = options.option_name('port')
        raise UserError(
            f'{name} {port}: {host} cannot be listened on: {e.strerror or e}; take another {name},'
            ' or 0 for any'
        ) from e


def _in_url(host: str) -> str:
    return f'[{host}]' if ':' in host else host


def _config(app: Any, certificate: str | None, key: str | None) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=TimedProtocol,
        ws='none',
        lifespan='off',
        interface='asgi3',
        log_config=None,
        log_level='error',
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MOST_CONNECTIONS,
        backlog=MOST_CONNECTIONS,
        h11_max_incomplete_event_size=MOST_HEADER_BYTES,
        timeout_graceful_shutdown=GRACE_SECONDS,
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
