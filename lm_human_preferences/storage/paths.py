"""Parsing of local paths, URLs of blobs and hf:// paths, and the places of cached copies."""

import os
import re
import tempfile
import urllib.parse
from typing import Any

from lm_human_preferences.errors import UserError, about_option, os_errors_as

PUBLIC = 'openaipublic'  # Azure account of the original's published files; these files never change
HUB = 'hf://'  # prefix of paths on the Hugging Face hub
_URL = re.compile(
    r'(?:az://(?P<azure>[a-z0-9]+)/'
    r'|https://(?P<https>[a-z0-9]+)\.blob\.core\.windows\.net/'
    # The original's files on Google's storage are now in the Azure account openaipublic.
    r'|(?:gs://|https://storage\.googleapis\.com/)(?=(?:gpt-2|lm-human-preferences)/))'
    r'(?P<container>[a-z0-9][a-z0-9._-]*)/(?P<name>[^?#]+)'
)
_SCHEME = re.compile('(az|gs|hf|https?|s3):')
_REPOSITORY = r'(?P<repository>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[^/@?#\s]+))?'
_MODEL = re.compile(_REPOSITORY)
_HUB_PATH = re.compile(rf'{HUB}(?P<kind>datasets/)?{_REPOSITORY}(?:/(?P<name>[^?#]+))?')
_COMMIT = re.compile('[0-9a-f]{40}')
# Unsafe in names: backslashes, wildcards, control characters, surrogates, endings .part and .lock
_UNSAFE = re.compile(r'[\\*?[\]\x00-\x1f\x7f\ud800-\udfff]|\.(part|lock)(/|$)')


class StorageError(UserError):
    """Error: a file cannot be read or written."""


class NotFound(StorageError):
    """Error: a file does not exist."""


class Remote:
    """Parsed remote path; its attribute `path` is the same path, spelled with az:// or hf://."""

    path: str

    def error(self, reason: str, kind: type[StorageError] = StorageError) -> StorageError:
        """Return an error with a message of one line: the path, and `reason`."""
        return kind(f'{self.path}: {" ".join(reason.split())}')


class Blob(Remote):
    """Parsed URL of a blob. path: the URL for blobfile. cached: path of its local copy.

    may_change: True if the server must be asked whether the copy is current.
    """

    def __init__(self, path: str) -> None:
        match = _URL.fullmatch(path)
        name = match['name'] if match else ''
        if path.startswith('https:'):
            name = urllib.parse.unquote(name)
        if match is None or not is_safe(name):
            raise StorageError(
                f'{path!r}: give a local path, az://ACCOUNT/CONTAINER/NAME or'
                ' https://ACCOUNT.blob.core.windows.net/CONTAINER/NAME, without * ? [ ] in NAME'
            )
        self.account = match['azure'] or match['https'] or PUBLIC
        self.container = match['container']
        self.may_change = self.account != PUBLIC and not is_offline()
        self.relative_path = os.path.join(self.account, self.container, name)
        self.path = f'az://{self.relative_path}'
        self.cached = os.path.join(cache_root(), self.relative_path)


class HubPath(Remote):
    """Parsed hf:// path. name: the file's path in the repository, '' for a whole model."""

    def __init__(self, path: str) -> None:
        match = _HUB_PATH.fullmatch(path)
        name = match['name'] or '' if match else ''
        if match is None or (name and not is_safe(name)) or (match['kind'] and not name):
            raise StorageError(
                f'{path!r}: give hf://ORG/NAME for a model, hf://ORG/NAME/FILE, or'
                ' hf://datasets/ORG/NAME/FILE; @REVISION may follow NAME'
            )
        self.path = path
        self.kind = 'dataset' if match['kind'] else 'model'
        self.repository = match['repository']
        self.revision = urllib.parse.unquote(match['revision'] or 'main')
        self.name = name
        self.is_commit = _COMMIT.fullmatch(self.revision) is not None  # a commit never changes

    def at(self, commit: str) -> str:
        """Return the same path with `commit` as its revision."""
        kind = 'datasets/' if self.kind == 'dataset' else ''
        file = f'/{self.name}' if self.name else ''
        return f'{HUB}{kind}{self.repository}@{commit}{file}'


def is_hub(path: str) -> bool:
    """Return whether `path` is an hf:// path."""
    return path.startswith(HUB)


def is_model_name(name: str) -> bool:
    """Return whether `name` looks like ORG/NAME[@REVISION]; a local path may look so, too."""
    return _MODEL.fullmatch(name) is not None


def is_safe(name: str) -> bool:
    """Return whether a remote file's name is a safe path, which stays inside its folder."""
    if any(part in ('', '.', '..') for part in name.split('/')):
        return False
    return not _UNSAFE.search(name)


def is_offline() -> bool:
    """Return whether LMHP_OFFLINE=1 forbids use of the network."""
    return os.environ.get('LMHP_OFFLINE') == '1'


def cache_root() -> str:
    """Return the cache folder for downloads and other results that are kept."""
    return os.environ.get('LMHP_CACHE') or os.path.expanduser('~/.cache/lm-human-preferences')


def make_cache_folder(path: str) -> None:
    """Make a folder in the cache; StorageError if it cannot be written."""
    fix = '; set LMHP_CACHE to a folder in which you may write'
    with os_errors_as(f'the cache folder {path} cannot be written', fix, StorageError):
        os.makedirs(path, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass


def is_remote(path: str) -> bool:
    """Return whether `path` is a URL, even with missing slashes, as in gs:bucket."""
    return '://' in path or _SCHEME.match(path) is not None


def join(path: str, *names: str) -> str:
    """Return a local or remote path extended by `names`."""
    if is_remote(path):
        return '/'.join([path.rstrip('/'), *names])
    return os.path.join(path, *names)


def absolute(path: str) -> str:
    """Return a local path as an absolute path; a URL unchanged."""
    return path if is_remote(path) else os.path.abspath(path)


def staging_dir(directory: str) -> str:
    """Return a run's local directory: for a remote run, the folder of files to upload."""
    if not is_remote(directory):
        return directory
    with about_option('--save_dir', StorageError):
        return os.path.join(cache_root(), 'to-upload', Blob(join(directory)).relative_path)


def model_path(name: str) -> str | None:
    """Return the hf:// path of a model on the hub; None for other names and local paths."""
    if is_hub(name):
        hub = HubPath(name)
        if hub.kind != 'model' or hub.name:
            raise hub.error('this path is not a model: give hf://ORG/NAME')
        return name
    return HUB + name if is_model_name(name) and not os.path.lexists(name) else None


def is_pin_of(recorded: Any, given: Any) -> bool:
    """Return whether `recorded` is the path `given` with a commit instead of a branch or tag."""
    try:
        before, now = (HubPath(with_scheme(name)) for name in (recorded, given))
    except (StorageError, TypeError):
        return False
    is_same = now.at(before.revision) == before.at(before.revision)
    return is_same and before.is_commit and not now.is_commit


def with_scheme(name: str) -> str:
    """Return the hf:// path of a name that looks like ORG/NAME; other names stay as they are."""
    return HUB + name if is_model_name(name) else name
