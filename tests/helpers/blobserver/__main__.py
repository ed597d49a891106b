"""`python -m blobserver FOLDER CERTIFICATE DELAY`: FOLDER's files on a server of their own, slowly.

What it serves is FOLDER/ACCOUNT/CONTAINER/NAME. It prints its port, and ends with its standard
input.
"""

import sys
from pathlib import Path

from blobserver.server import BlobServer, Fault


def blobs_below(folder: Path) -> dict[str, dict[str, bytes]]:
    """{'account/container': {name: bytes}} of the files."""
    return {
        str(container.relative_to(folder)): {
            str(path.relative_to(container)): path.read_bytes()
            for path in container.rglob('*')
            if path.is_file()
        }
        for container in folder.glob('*/*')
    }


if __name__ == '__main__':
    folder, certificate, delay = sys.argv[1:]
    with BlobServer(blobs_below(Path(folder)), certificate=certificate) as server:
        server.faults.append(Fault('slow', float(delay), times=None, method='GET'))
        print(server.port, flush=True)
        sys.stdin.read()
