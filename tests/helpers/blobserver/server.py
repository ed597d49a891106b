"""A small HTTPS imitation of Azure Blob Storage's API, with faults on demand. Standard library
only.

    blobs = {'openaipublic/lm-human-preferences': {'labels/a.json': b'[]'}}
    with BlobServer(blobs, certificate=path) as server, redirect(server):
        ...  # https://openaipublic.blob.core.windows.net/... is the server now
        server.faults.append(Fault('status', 503, times=2, path=r'a\\.json'))
        assert server.count('GET', 'a.json') == 1

It answers Get Blob and Get Blob Properties, with ranges and If-Match, and error bodies in Azure's
form. Like many public containers it cannot be listed, and like Azure it does not fall back to
anonymous access when a request carries credentials. A private account answers requests that are
signed, by any key: also Put Block, Put Block List, Get Block List, Delete Blob and List Blobs.

`redirect` sends host names to it inside this process and lets no other name resolve, so that a test
cannot reach the network; TLS still verifies the real name. For child processes see
sitecustomize.py.
"""

import base64
import contextlib
import email.utils
import functools
import hashlib
import http.server
import os
import re
import socket
import socketserver
import ssl
import sys
import threading
import time
import types
import urllib.parse
from collections import namedtuple
from unittest import mock

SUFFIX = '.blob.core.windows.net'
HOSTS = tuple(account + SUFFIX for account in ('openaipublic', 'private'))
LAST_MODIFIED = 'Mon, 08 Mar 2021 12:00:00 GMT'
Logged = namedtuple('Logged', 'method path status')


class Fault:
    """What goes wrong for the next `times` requests (None: all) of `method` to a matching `path`.

    status N     this status and an Azure error body
    truncate N   the right headers, N bytes of the body, then the connection closes
    corrupt N    a flipped bit in byte N of the body; every header is right
    stall S      S seconds of silence, then the connection closes
    slow S       S seconds before each 64 KiB of the body
    """

    def __init__(self, kind, arg=None, *, times=1, path='', method=''):
        self.kind, self.arg, self.times = kind, arg, times
        self.path, self.method = re.compile(path), method
        self.hits = 0
        self._lock = threading.Lock()

    def take(self, method, path):
        """Return whether this request is to go wrong; counted if so."""
        with self._lock:
            due = (
                self.method in ('', method)
                and self.path.search(path) is not None
                and (self.times is None or self.hits < self.times)
            )
            self.hits += due
            return due


class BlobServer:
    """Server of {"account/container": {name: bytes}}; `on_change()` follows each change."""

    def __init__(self, blobs, *, certificate, with_md5=True, private=()):
        self.blobs, self.certificate = blobs, certificate
        self.with_md5, self.private = with_md5, private
        self.on_change = lambda: None
        self.faults, self.log = [], []
        self.uncommitted, self.committed = {}, {}  # path of a blob -> {id of a block: its bytes}
        self.properties = {}  # path of a blob -> (MD5, time) of its last change
        self.changing = threading.Lock()  # a blob and its properties change at once, as in Azure
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        handler = type('Handler', (_Handler,), {'state': self})
        self._httpd = _Server(('127.0.0.1', 0), handler, context)
        self.host, self.port = self._httpd.server_address[:2]

    def __enter__(self):
        serve = functools.partial(self._httpd.serve_forever, poll_interval=0.02)
        threading.Thread(target=serve, daemon=True).start()
        return self

    def __exit__(self, *exc):
        self.stop()

    def stop(self):
        self._httpd.shutdown()
        self._httpd.server_close()
        self._httpd.close_all()

    def count(self, method='', path=''):
        asked = [each.path for each in self.log if method in ('', each.method)]
        return sum(re.search(path, each) is not None for each in asked)


class _Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads, allow_reuse_address, request_queue_size = True, True, 128

    def __init__(self, address, handler, context):
        self.context, self._open, self._open_lock = context, set(), threading.Lock()
        super().__init__(address, handler)

    def server_bind(self):  # HTTPServer's asks the name service for its own name
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]

    def process_request_thread(self, request, client_address):
        try:  # the handshake belongs into the thread
            request.settimeout(30)
            request = self.context.wrap_socket(request, server_side=True)
        except OSError:
            return request.close()
        with self._open_lock:
            self._open.add(request)
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._open_lock:
                self._open.discard(request)

    def close_all(self):
        with self._open_lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version, disable_nagle_algorithm = 'HTTP/1.1', True

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.answer()

    do_GET = do_PUT = do_DELETE = do_HEAD

    def answer(self):
        self.body = self.rfile.read(int(self.headers.get('Content-Length', 0)))
        fault = next((f for f in self.state.faults if f.take(self.command, self.path)), None)
        fault = fault or types.SimpleNamespace(kind=None, arg=None)
        self.kind, self.arg = fault.kind, fault.arg
        if self.kind == 'stall':
            self.record(0)
            time.sleep(self.arg)
            self.close_connection = True
            return None
        if self.kind == 'status':
            return self.error(self.arg, 'Injected')
        url = urllib.parse.urlsplit(self.path)
        self.query = dict(urllib.parse.parse_qsl(url.query))
        container, _, self.name = urllib.parse.unquote(url.path).removeprefix('/').partition('/')
        account = self.headers.get('Host', '').split(':')[0].removesuffix(SUFFIX)
        self.place = f'{account}/{container}/{self.name}'
        signature = self.headers.get('Authorization')
        if account in self.state.private and not signature:
            return self.error(409, 'PublicAccessNotPermitted')
        if account not in self.state.private and (signature or self.command == 'PUT'):
            return self.error(403, 'AuthenticationFailed')
        self.blobs = self.state.blobs.get(f'{account}/{container}')
        if self.blobs is None:
            return self.error(404, 'ContainerNotFound')
        return getattr(self, f'{self.command}_{self.query.get("comp", "blob")}'.lower())()

    def get_blob(self):
        with self.state.changing:
            body, properties = self.blobs.get(self.name), self.state.properties.get(self.place)
        return self.error(404, 'BlobNotFound') if body is None else self.send_blob(body, properties)

    head_blob = get_blob

    def get_list(self):
        prefix = self.query.get('prefix', '')
        names = sorted(name for name in self.blobs if name.startswith(prefix))
        entries = ''.join(self.list_entry(name) for name in names)
        body = '<?xml version="1.0" encoding="utf-8"?><EnumerationResults><Blobs>' + entries
        body += '</Blobs><NextMarker></NextMarker></EnumerationResults>'
        return self.reply(200, body.encode(), {'Content-Type': 'application/xml'})

    def list_entry(self, name):
        container = self.place.removesuffix(self.name)
        md5, modified = self.state.properties.get(container + name, ('', LAST_MODIFIED))
        return (
            f'<Blob><Name>{name}</Name><Properties><Creation-Time>{LAST_MODIFIED}</Creation-Time>'
            f'<Last-Modified>{modified}</Last-Modified><Etag>x</Etag><Content-MD5>{md5}</Content-MD5>'
            f'<Content-Length>{len(self.blobs[name])}</Content-Length></Properties></Blob>'
        )

    def get_blocklist(self):
        committed = self.state.committed.get(self.place, ())
        blocks = ''.join(f'<Block><Name>{block}</Name></Block>' for block in committed)
        text = f'<BlockList><CommittedBlocks>{blocks}</CommittedBlocks></BlockList>'
        return self.reply(200, text.encode(), {})

    def put_block(self):
        md5 = base64.b64encode(hashlib.md5(self.body).digest()).decode()
        if md5 != self.headers.get('Content-MD5'):
            return self.error(400, 'Md5Mismatch')
        self.state.uncommitted.setdefault(self.place, {})[self.query['blockid']] = self.body
        return self.reply(201, b'', {})

    def put_blocklist(self):
        wanted = re.findall('<Latest>(.*?)</Latest>', self.body.decode())
        md5 = self.headers.get('x-ms-blob-content-md5', '')
        properties = (md5, email.utils.formatdate(usegmt=True))
        with self.state.changing:
            blocks = self.state.committed.get(self.place, {})
            blocks = blocks | self.state.uncommitted.pop(self.place, {})
            if not blocks.keys() >= set(wanted):
                return self.error(400, 'InvalidBlockList')
            self.state.committed[self.place] = {block: blocks[block] for block in wanted}
            body = b''.join(self.state.committed[self.place].values())
            self.blobs[self.name], self.state.properties[self.place] = body, properties
        self.state.on_change()
        return self.reply(201, b'', {'ETag': self.etag(body)})

    def delete_blob(self):
        if self.blobs.pop(self.name, None) is None:
            return self.error(404, 'BlobNotFound')
        self.state.committed.pop(self.place, None)
        self.state.on_change()
        return self.reply(202, b'', {})

    def etag(self, body):
        return f'"0x{hashlib.sha1(body).hexdigest()[:15]}"'

    def send_blob(self, body, properties):
        """Answer with `body`; properties: (MD5, time) of its last change, None: there was none."""
        etag = self.etag(body)
        if self.headers.get('If-Match', etag) != etag:
            return self.error(412, 'ConditionNotMet')
        md5 = base64.b64encode(hashlib.md5(body).digest()).decode() if self.state.with_md5 else None
        md5, modified = properties or (md5, LAST_MODIFIED)
        headers = {
            'ETag': etag,
            'Last-Modified': modified,
            'x-ms-creation-time': LAST_MODIFIED,
            'x-ms-blob-type': 'BlockBlob',
        }
        wanted = re.fullmatch(r'bytes=(\d+)-(\d*)', self.headers.get('Range') or '')
        if not wanted:
            return self.reply(200, body, headers | ({'Content-MD5': md5} if md5 else {}))
        start, end = int(wanted[1]), min(int(wanted[2] or len(body)) + 1, len(body))
        if start >= len(body):
            return self.error(416, 'InvalidRange')
        headers['Content-Range'] = f'bytes {start}-{end - 1}/{len(body)}'
        return self.reply(206, body[start:end], headers)

    def error(self, status, code):
        body = b'\xef\xbb\xbf<?xml version="1.0" encoding="utf-8"?>'
        body += b'<Error><Code>%s</Code><Message>x</Message></Error>'
        headers = {'Content-Type': 'application/xml', 'x-ms-error-code': code}
        self.reply(status, body % code.encode(), headers)

    def reply(self, status, body, headers):
        self.record(status)
        self.send_response(status)
        for key, value in {'Content-Length': len(body), **headers}.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == 'HEAD':
            return
        if self.kind == 'truncate':
            body, self.close_connection = body[: self.arg], True
        elif self.kind == 'corrupt':
            body = body[: self.arg] + bytes([body[self.arg] ^ 1]) + body[self.arg + 1 :]
        for i in range(0, len(body), 1 << 16):
            time.sleep(self.arg if self.kind == 'slow' else 0)
            self.wfile.write(body[i : i + (1 << 16)])

    def record(self, status):
        self.state.log.append(Logged(self.command, urllib.parse.unquote(self.path), status))


def install_redirect(spec):
    """Let the names of `spec` ('host=127.0.0.1:8443,...') alone resolve, to address and port."""
    table = {}
    for item in filter(None, spec.split(',')):
        host, _, address = item.partition('=')
        ip, _, port = address.rpartition(':')
        table[host] = (ip, int(port))
    original = socket.getaddrinfo

    def getaddrinfo(host, port, *args, **kwargs):
        if host in table:
            return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, '', table[host])]
        if host in (None, '', 'localhost', '127.0.0.1', '::1', '0.0.0.0'):
            return original(host, port, *args, **kwargs)
        reason = f'Temporary failure in name resolution (blocked in tests: {host})'
        raise socket.gaierror(socket.EAI_AGAIN, reason)

    socket.getaddrinfo = getaddrinfo


@contextlib.contextmanager
def redirect(server):
    """Redirect HOSTS, and no other names, to `server` (None: no network), also in children."""
    getaddrinfo = socket.getaddrinfo
    spec = ','.join(f'{host}={server.host}:{server.port}' for host in HOSTS) if server else ''
    environment = {'BLOBTEST_REDIRECT': spec}  # for children
    if hasattr(server, 'certificate'):
        environment['SSL_CERT_FILE'] = server.certificate
    install_redirect(spec)
    try:
        with mock.patch.dict(os.environ, environment):
            yield
    finally:
        socket.getaddrinfo = getaddrinfo


class BlackHole:
    """Port whose backlog is full: connections are neither accepted nor refused."""

    def __enter__(self):
        self._sockets = [socket.socket()]
        self._sockets[0].bind(('127.0.0.1', 0))
        self._sockets[0].listen(0)
        self.host, self.port = self._sockets[0].getsockname()
        for _ in range(4):
            self._sockets.append(socket.socket())
            self._sockets[-1].setblocking(False)
            self._sockets[-1].connect_ex((self.host, self.port))
        time.sleep(0.05)
        return self

    def __exit__(self, *exc):
        for s in self._sockets:
            s.close()
