"""Reverse proxy, Debian's nginx, in front of a page for labellers."""

import contextlib
import os
import shutil
import socket
import subprocess

import pytest

NGINX = shutil.which('nginx', path=f'{os.environ["PATH"]}:/usr/sbin')
needs_nginx = pytest.mark.skipif(NGINX is None, reason='there is no nginx (Debian: nginx-light)')

SETTINGS = """
daemon off; master_process off; pid nginx.pid; error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path t1; proxy_temp_path t2;
    fastcgi_temp_path t3; uwsgi_temp_path t4; scgi_temp_path t5;
    server {{
        listen 127.0.0.1:{port};
        location /preferences/ {{ proxy_pass http://127.0.0.1:{page}/; }}
    }}
}}
"""


def free_port():
    with socket.create_server(('127.0.0.1', 0)) as free:
        return free.getsockname()[1]


@contextlib.contextmanager
def proxy(folder, page):
    """Yield the port of a proxy of /preferences/ to the port `page`."""
    port = free_port()
    (folder / 'nginx.conf').write_text(SETTINGS.format(port=port, page=page))
    command = [NGINX, '-p', folder, '-c', 'nginx.conf', '-e', 'stderr']
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            yield port
        finally:
            process.terminate()
