"""Checkpoints of a training run in the original's format, written so that a crash at any moment loses none of them.

    DIRECTORY/checkpoint                           the newest and all that are kept; replaced last: this is the commit
    DIRECTORY/model.ckpt-N.data-00000-of-00001     values of the variables, under the original's names
    DIRECTORY/model.ckpt-N.index                   their names, shapes and checksums
    DIRECTORY/model.ckpt-N.resume.json             what TensorFlow does not keep

The original program reads these directories as its own, and nothing in them can execute.
"""
import errno
import hashlib
import json
import os
import re
import shutil

from lm_human_preferences.utils import storage, tf_bundle
from lm_human_preferences.utils.errors import UserError

NAME = r'model\.ckpt(?:-\d+)?'
RESUME = '.resume.json'
SUFFIX = r'\.(?:index|meta|resume\.json|data-\d{5}-of-\d{5})'
FILE = re.compile(f'({NAME})({SUFFIX})')
LEFTOVER = re.compile(rf'(?:checkpoint|{NAME}{SUFFIX})\.\d+\.part')
LISTED = re.compile(r'^[ \t]*(model_checkpoint_path|all_model_checkpoint_paths)[ \t]*:[ \t]*'
                    r'"(?:[^"\n]*[/\\])?([\w+=@-][\w.+=@ -]{0,200})"[ \t\r]*$', re.M | re.A)


def parse_checkpoint_file(text):
    """Names of the checkpoints that the text of a `checkpoint` file (CheckpointState) lists, the one in force last.

    Of a path, such as a training machine's, only the base name counts: a checkpoint is always beside the file.
    """
    listed = LISTED.findall(text)
    newest = [name for field, name in listed if field == 'model_checkpoint_path'][:1]
    return [name for name in dict.fromkeys(name for _, name in listed) if name not in newest] + newest


def latest(directory):
    """The prefix of the newest checkpoint in a local directory, None where there is none."""
    kept = _kept(directory)
    return os.path.join(directory, kept[-1]) if kept else None


def _kept(directory):
    """Names of the checkpoints that `directory` lists and has, the newest last."""
    path = os.path.join(directory, 'checkpoint')
    try:
        with open(path, encoding='utf-8', errors='replace') as f:
            names = parse_checkpoint_file(f.read())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as e:
        raise UserError(f'{path} cannot be read: {e.strerror}') from e
    return [name for name in names if os.path.exists(os.path.join(directory, f'{name}.index'))]


def check_directory(directory, option='--save_dir'):
    """Raise UserError where a run could not be kept in `directory` (None: it is not kept), before time is spent."""
    if directory and storage.is_remote(directory):
        raise UserError(f'{option}: {directory} is remote; runs are kept in local directories only')
    existing = os.path.abspath(directory or '.')
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    if directory and not (os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK)):
        raise UserError(f'{option}: {directory} cannot be made: {existing} is no directory that you may write to')


def save(directory, name, tensors, *, state=None, max_to_keep=20):
    """Save a checkpoint, make it the newest and delete the oldest beyond `max_to_keep`; returns its prefix.

    name: 'model.ckpt', or 'model.ckpt-N' for step N. tensors: {variable name: array or torch tensor}, converted and
    written one at a time. state: what else to keep, as JSON, for `restore_state`.
    Raises UserError where the directory cannot be written or the disk is full; what was there is then as it was.
    """
    assert re.fullmatch(NAME, name), name
    prefix = os.path.join(directory, name)
    need = sum(getattr(tensor, 'nbytes', 8) for tensor in tensors.values()) + (1 << 20)
    free = 'free space unknown'
    try:
        os.makedirs(directory, exist_ok=True)
        room = shutil.disk_usage(directory).free
        free = f'{room >> 20} MiB are free'
        if room < need:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        kept = _kept(directory)
        keep = ([other for other in kept if other != name] + [name])[-max_to_keep:]
        try:
            write_bundle(prefix, tensors, state)
            _commit(directory, keep)
        except BaseException:
            _delete(directory, {name} - set(kept))
            raise
        # Only we write resume.json, so that one that is not listed is a killed run's.
        resumable = {file.removesuffix(RESUME) for file in os.listdir(directory) if file.endswith(RESUME)}
        _delete(directory, (resumable | set(kept)) - set(keep))
    except OSError as e:
        raise UserError(f'cannot save {name} in {directory}: {e.strerror}; it needs {need >> 20} MiB, {free}') from e
    return prefix


def write_bundle(prefix, tensors, state=None):
    """Write the checkpoint `prefix` byte for byte as tf.train.Saver does, and `state` beside it; all of it, or nothing.

    The resume.json names the index by digest, and that holds the checksum of every tensor.
    """
    paths = [f'{prefix}{RESUME}'] if state is not None else []
    with storage.replacing(*paths, f'{prefix}.data-00000-of-00001', f'{prefix}.index') as (*resume, data, index):
        table = tf_bundle.write_values(data, tensors)
        index.write(table)
        for file in resume:
            file.write(json.dumps({'index_sha256': hashlib.sha256(table).hexdigest(), 'state': state}).encode())


def _commit(directory, keep):
    """Replace the `checkpoint` file; the text is tf.train.Saver's with save_relative_paths."""
    lines = [f'model_checkpoint_path: "{keep[-1]}"\n', *(f'all_model_checkpoint_paths: "{name}"\n' for name in keep)]
    with storage.replacing(os.path.join(directory, 'checkpoint')) as (file,):
        file.write(''.join(lines).encode())


def _delete(directory, names):
    """Delete the files of the checkpoints `names`, and what killed runs left half written."""
    for file in sorted(os.listdir(directory)):  # resume.json last: until then the rest is found again
        match = FILE.fullmatch(file)
        if LEFTOVER.fullmatch(file) or match and match[1] in names:
            os.remove(os.path.join(directory, file))


def restore_state(prefix):
    """The `state` saved with the checkpoint `prefix`, None where there is none; UserError if it is damaged."""
    path = prefix + RESUME
    if not os.path.exists(path):
        return None
    saved = storage.read_json(path)
    with open(f'{prefix}.index', 'rb') as f:
        digest = hashlib.sha256(f.read()).hexdigest()
    if not isinstance(saved, dict) or saved.get('index_sha256') != digest:
        raise UserError(f'{path} does not belong to {prefix}.index: one of them is damaged')
    return saved['state']


def write_json(path, value):
    """Write `value` to a local file, indented as the original did; all of it appears, or nothing."""
    try:
        os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
        with storage.replacing(path) as (file,):
            file.write(json.dumps(value, indent=2).encode())
    except OSError as e:
        raise UserError(f'cannot write {path}: {e.strerror}') from e
