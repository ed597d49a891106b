"""Random files and command lines end in a result or in one line (LMHP_FAULTS=64: all)."""

import contextlib
import functools
import importlib
import io
import json
import os
import random as randoms
import struct
from unittest import mock

import pytest
from command_line import error_of, invoke
from experiments import resolved
from file_kinds import KINDS
from fuzzing import confined, damaged, json_bytes, little_memory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launched import FAULTS
from sample_files import SIZES, write_hugging_face, write_model

import launch
import sample
from lm_human_preferences import storage
from lm_human_preferences.cli import launch as jobs
from lm_human_preferences.datasets.jsonl import read_jsonl
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams import policy_options
from lm_human_preferences.language import trained_models
from lm_human_preferences.language.datasets import get_dataset
from lm_human_preferences.runs import run_dir
from lm_human_preferences.storage.files import masked_crc
from lm_human_preferences.utils.logging import Logger

GPT2 = {'model_type': 'gpt2', 'vocab_size': 27}
BATCH = 25  # inputs of one example: most of what an example costs is hypothesis


class File:
    inputs = 2_000

    def __init__(self, kind, folder):
        # Some inputs need it, and it opens libraries, which an input must not.
        importlib.import_module('transformers.modeling_utils')
        self.kind, self.folder = kind, folder
        kind.write(folder)
        self.path = folder / kind.file
        self.good = self.path.read_bytes()
        self.is_json = self.path.suffix == '.json' and not kind.file.endswith('.resume.json')

    def feed(self, random):
        if random.random() < 0.1:
            self.path.write_bytes(self.good)
        elif self.is_json and random.random() < 0.7:
            self.path.write_bytes(json_bytes(random, json.loads(self.good)))
        else:
            self.path.write_bytes(damaged(random, self.good))
        with contextlib.redirect_stderr(io.StringIO()):
            self.kind.read(self.folder)


class CommandLine:
    inputs = 4_000
    words = (
        'train_policy train_reward export resume sample evaluate test cnndm first -- -h --help'
        ' --dry_run --mpi 1 --ppo.lr --nolr .. /x -x = "" \' --rewards.adaptive_kl'
    ).split()
    values = '1 0 -1 1e3 1e999 nan None on off " 1_0 ٣ "\\ud800" b\'x\' 1j {1} ... x=y'.split()
    values += ['', '\n', '\udcff', '9' * 5000, '0x' + 'f' * 5000, '(' * 200, '[' * 90]
    values += ['-' * 300 + '1']

    def __init__(self, folder):
        self.folder = folder
        commands = (launch.cli.commands[name] for name in ('train_policy', 'train_reward'))
        self.fields = [field for command in commands for field in command.fields]

    def feed(self, random):
        words = []
        if random.random() < 0.8:
            command = random.choice(['train_policy', 'train_reward'])
            words = [command, random.choice(['test', 'sentiment']), 'first', '--dry_run']
        for _ in range(random.randrange(4)):
            option = f'--{random.choice(self.fields)}'
            value = f'{option}={random.choice(self.values)}'
            words.append(random.choice([random.choice(self.words), option, value]))
        if random.random() < 0.2:
            random.shuffle(words)
        out, err = io.TextIOWrapper(io.BytesIO(), encoding='utf-8'), io.StringIO()
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            mock.patch.object(jobs, 'start_job'),
        ):
            cli = random.choice([launch.cli, launch.cli, sample.cli])
            try:
                cli.main([*words, f'--save_dir={self.folder}'])
            except SystemExit as e:
                printed = err.getvalue()
                assert e.code == 2 and printed.splitlines()[-1].startswith('error: '), printed
                raise UserError(printed) from e


class StorageNames:
    """Paths and URLs: what is let through has its place in the cache."""

    inputs = 10_000
    parts = (
        'az:// gs:// https:// openaipublic .blob.core.windows.net gpt-2 lm-human-preferences / / ..'
        ' . %2e%2e %2f %00 \0 \\ ~ a x.json ? # \udcff // : @ % /etc .lock .part'
    ).split(' ')
    parts += ['\n', 'x' * 300]

    def __init__(self, folder):
        self.root = str(folder / 'cache')
        (folder / 'cache/openaipublic/gpt-2').mkdir(parents=True)
        (folder / 'cache/openaipublic/gpt-2/a').write_text('here')

    def feed(self, random):
        path = ''.join(random.choices(self.parts, k=random.randrange(1, 9)))
        if random.random() < 0.7:
            start = random.choice(['az://openaipublic/gpt-2/', 'gs://gpt-2/'])
            path = start + random.choice([path, path, path, 'a'])
        with mock.patch.dict(os.environ, LMHP_CACHE=self.root, LMHP_OFFLINE='1'):
            storage.exists(storage.join(path, 'x'))
            if storage.is_remote(path):
                place = storage.paths.Blob(path).cached
                assert place == os.path.normpath(place)
                assert place.startswith(f'{self.root}/')
            assert storage.read_text(path) == 'here'


TARGETS = {name: functools.partial(File, kind) for name, kind in KINDS.items()}
TARGETS |= {'command line': CommandLine, 'names in storage': StorageNames}


@pytest.mark.parametrize('name', TARGETS)
def test_any_input(name, tmp_path, monkeypatch):
    monkeypatch.delenv('LMHP_GPT2_ENCODINGS', raising=False)
    monkeypatch.setenv('LMHP_OFFLINE', '1')
    parser, ended = TARGETS[name](tmp_path), {'well': 0, 'told': 0}

    @settings(
        max_examples=int(parser.inputs * min(1, FAULTS / 64) / BATCH),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 2**64 - 1))
    def feed(seed):
        for number in range(BATCH):
            try:
                confined(tmp_path, parser.feed, randoms.Random(f'{seed} {number}'))
                ended['well'] += 1
            except UserError as e:
                assert len(str(e)) < 20_000
                ended['told'] += 1

    with little_memory():
        feed()
    # The good input among them shows that the bad is refused for its own sake.
    assert min(ended.values()) > 0


def told(call, *arguments):
    with pytest.raises(UserError) as caught, little_memory():
        confined('/tmp', call, *arguments)
    assert '\n' not in str(caught.value) and len(str(caught.value)) < 1000
    return str(caught.value)


@pytest.mark.parametrize(
    'make, words',
    [
        (os.mkdir, 'is not a file'),
        (os.mkfifo, 'is not a file'),
        (lambda path: os.symlink('/dev/zero', path), 'is not a file'),
        (lambda path: os.symlink(path, path), 'no such file'),
    ],
    ids=['folder', 'pipe', 'device', 'circle'],
)
def test_files_of_other_kinds(tmp_path, make, words):
    make(tmp_path / 'x.jsonl')
    for read in (storage.read_text, storage.read_json, read_jsonl, get_dataset):
        assert words in told(read, str(tmp_path / 'x.jsonl'))


def test_numbers_of_thousands_of_digits(tmp_path):
    path = tmp_path / 'x.jsonl'
    path.write_text('9' * 5000)
    for read in (storage.read_json, read_jsonl, policy_options.HParams().override_from_json_file):
        assert 'Exceeds the limit' in told(read, str(path))


@pytest.mark.parametrize(
    'name, value, words',
    [
        ('ours/hparams.json', SIZES | {'n_layer': 10**9}, 'sizes are larger than those of any'),
        ('ours/hparams.json', SIZES | {'n_head': 0}, '--n_head must be at least 1, got 0'),
        ('ours/hparams.json', SIZES | {'n_ctx': True}, 'sizes must be numbers, not true or false'),
        ('ours/encoding', ['test'], "unknown encoding ['test']"),
        ('theirs/config.json', GPT2 | {'n_embd': 'x'}, '--n_embd must be a whole number'),
    ],
)
def test_parts_of_models(tmp_path, name, value, words):
    write_model(tmp_path / 'ours')
    (tmp_path / 'theirs').mkdir()
    write_hugging_face(tmp_path / 'theirs')
    (tmp_path / name).write_text(json.dumps(value))
    model = trained_models.TrainedModel(str(tmp_path / name.partition('/')[0]))
    assert words in told(lambda: model.build(scope='policy'))


@pytest.mark.parametrize(
    'option, value',
    [('ppo.lr', 'nan'), ('rewards.kl_coef', '-inf'), ('rewards.adaptive_kl.target', '1e308')],
)
def test_numbers_that_no_tensor_holds(tmp_path, option, value):
    typed = ['train_policy', 'test', 'first', '--dry_run', f'--{option}', value]
    assert f'--{option} must be a finite number, got' in error_of(invoke(typed))
    hparams = resolved('train_policy', 'test')
    hparams.override_from_dict({option: float(value)})
    (tmp_path / 'train_policy_hparams.json').write_text(json.dumps(hparams.to_nested_dict()))
    name = option.rpartition('.')[2]
    assert f'.{name} must be a finite number' in error_of(invoke(['resume', str(tmp_path)]))


def test_events_that_are_none(tmp_path):
    """What lies among TensorBoard's files and is none of ours stays, and is not waited for."""
    folder = tmp_path / 'tb/ppo'
    folder.mkdir(parents=True)
    os.mkfifo(folder / 'events.out.tfevents.1')
    (tmp_path / 'precious').write_text('mine')
    os.symlink(tmp_path / 'precious', folder / 'events.out.tfevents.2')
    os.mkdir(folder / 'events.out.tfevents.3')
    size, event = struct.pack('<Q', 3), b'\xff\xff\xff'
    (folder / 'events.out.tfevents.4').write_bytes(
        size + struct.pack('<I', masked_crc(size)) + event + struct.pack('<I', masked_crc(event))
    )
    (folder / 'events.out.tfevents.5').write_bytes(b'\xff' * 1000)
    logger = Logger(str(tmp_path), 'ppo', log_interval=1, comm=Comm())
    confined(tmp_path, logger.purge_from, 3)
    assert sorted(path.name[-1] for path in folder.iterdir()) == ['1', '2', '3']
    assert (tmp_path / 'precious').read_text() == 'mine'


def test_a_link_in_the_place_of_a_part_is_not_followed(tmp_path):
    (tmp_path / 'precious').write_text('mine')
    os.symlink(tmp_path / 'precious', tmp_path / f'x.json.{os.getpid()}.part')
    with pytest.raises(UserError, match='cannot write'):
        storage.write_json(str(tmp_path / 'x.json'), 1)
    assert (tmp_path / 'precious').read_text() == 'mine'


def test_lock_that_is_no_text_or_leads_elsewhere(tmp_path):
    (tmp_path / 'precious').write_text('of 8 ranks')
    (tmp_path / 'lock').write_bytes(b'\xff' * 5000)
    hparams = resolved('train_policy', 'test')
    hparams.run.save_dir = str(tmp_path)
    lock = run_dir.lock_run_dir(hparams, Comm())
    assert 'is writing this run' in told(lock.__enter__)
    for make in (lambda path: os.symlink(tmp_path / 'precious', path), os.mkfifo):
        os.remove(tmp_path / 'lock')
        make(tmp_path / 'lock')
        with pytest.raises(UserError, match='cannot be written'):
            run_dir.lock_run_dir(hparams, Comm()).__enter__()
        assert run_dir.ranks_of(str(tmp_path)) is None
    assert (tmp_path / 'precious').read_text() == 'of 8 ranks'
