"""Whatever a file or a command line holds, it ends in the right result or in one line for the user:
4,375 inputs, or eight times as many with LMHP_FAULTS=16."""

import contextlib
import importlib
import io
import itertools
import json
import os
import random as randoms
import struct
from unittest import mock

import numpy as np
import pytest
import torch
from command_line import error_of, invoke
from fuzzing import confined, damaged, json_bytes, little_memory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launched import FAULTS
from sample_files import (
    LABELS,
    MERGES,
    SIZES,
    label_hparams,
    write_byte_pairs,
    write_hugging_face,
    write_model,
)

import launch
import sample
from lm_human_preferences import label_types, storage
from lm_human_preferences.checkpointing import checkpoints, tf_table
from lm_human_preferences.cli import launch as jobs
from lm_human_preferences.datasets import tldr
from lm_human_preferences.datasets.jsonl import read_jsonl
from lm_human_preferences.distributed.comm import LocalComm
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams import policy_options, reward_options
from lm_human_preferences.labels import label_files
from lm_human_preferences.language import encodings, trained_models, weights
from lm_human_preferences.language.datasets import get_dataset
from lm_human_preferences.rewards import TrainedRewardModel
from lm_human_preferences.runs import run_dir, run_settings
from lm_human_preferences.storage.crc import masked_crc
from lm_human_preferences.utils import core
from lm_human_preferences.utils.logging import Logger

BATCH = 25  # inputs of one example: most of what an example costs is hypothesis


class Labels:
    """Label files of every type."""

    inputs = 5_000

    def __init__(self, folder):
        self.path = folder / 'labels.json'

    def feed(self, random):
        self.path.write_bytes(json_bytes(random, LABELS))
        hparams = label_hparams(
            self.path,
            **{
                'labels.num_train': random.choice([None, 2]),
                'labels.type': random.choice(['best_of_2', 'scalar_rating', 'scalar_compare']),
            },
        )
        labels, _ = label_files.load_labels(hparams, encodings.Test)
        assert (
            labels['query'].shape[1:] == (3,)
            and 0 <= labels['query'].min() <= labels['query'].max() <= 27
        )


class Queries:
    """Texts, one JSON string a line, and the queries of label files that stand in for books."""

    inputs = 3_500

    def __init__(self, folder):
        self.path = folder / 'texts.jsonl'

    def feed(self, random):
        if random.random() < 0.5:
            self.path.write_bytes(b'\n'.join(json_bytes(random, 'a text.') for _ in range(3)))
            texts = read_jsonl(str(self.path))
            assert all(isinstance(text, str) for text in texts)
            dataset = get_dataset(str(self.path))
        else:
            self.path.write_bytes(json_bytes(random, LABELS))
            dataset = get_dataset('books', labels=str(self.path))
        sequences = dataset.sequences(
            3, mode='train', encoder=encodings.Test.get_encoder(), repeat_count=1
        )
        for tokens in sequences:
            torch.tensor(tokens, dtype=torch.int64)
            assert len(tokens) == 3 and all(0 <= token <= 27 for token in tokens)


class ModelDirectory:
    """A model of ours or of Hugging Face, one of whose files is damaged."""

    inputs = 1_750

    def __init__(self, folder):
        self.folder = folder
        write_model(folder / 'ours')
        (folder / 'theirs').mkdir()
        write_hugging_face(folder / 'theirs')
        # Some inputs need it, and it opens libraries, which an input must not.
        importlib.import_module('transformers.modeling_utils')
        self.files = {
            path: path.read_bytes() for path in sorted(folder.rglob('*')) if path.is_file()
        }

    def feed(self, random):
        path = random.choice([*self.files])
        is_json = path.suffix == '.json' or path.name == 'encoding'
        with restored(path, self.files[path]):
            path.write_bytes(
                json_bytes(random, json.loads(self.files[path]))
                if is_json and random.random() < 0.7
                else damaged(random, self.files[path])
            )
            directory = str(self.folder / path.relative_to(self.folder).parts[0])
            if 'ours' in directory and random.random() < 0.5:
                scorer = TrainedRewardModel(directory, encodings.Test)
                assert (
                    scorer.score(
                        torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, 2, dtype=torch.int64)
                    ).ndim
                    == 1
                )
            else:
                built = trained_models.TrainedModel(directory).build(
                    scope='policy', scalar_heads=['value']
                )
                assert built.hidden(torch.zeros(1, 3, dtype=torch.int64)).shape[:2] == (1, 3)


class RunHparams:
    """The settings that a run left behind, read for sampling from it and for going on with it."""

    inputs = 4_000

    def __init__(self, folder):
        self.folder, self.good = folder, launch_hparams().to_nested_dict()

    def feed(self, random):
        (self.folder / 'train_policy_hparams.json').write_bytes(json_bytes(random, self.good))
        if random.random() < 0.4:
            with (
                mock.patch.object(jobs, 'start_job') as run,
                contextlib.redirect_stderr(io.StringIO()),
            ):
                launch.resume({}, str(self.folder))
            assert run.call_count == 1
            return
        hparams = run_settings.load_run_hparams(str(self.folder))
        assert isinstance(hparams.task.query_length, int) and hparams.task.query_length > 0
        assert isinstance(hparams.rewards.trained_model, (str, type(None)))


class Checkpoint:
    """TensorFlow's index, values and list of checkpoints, with checksums right and wrong."""

    inputs = 5_000

    def __init__(self, folder):
        self.folder = folder
        tensors = {f'm/{i:03d}': np.full(i % 5, i, 'f4') for i in range(8)}
        checkpoints.save(
            str(folder),
            'model.ckpt',
            {**tensors, 'wte': np.ones((2, 3), 'f4'), 'step': np.int64(7)},
            state={'step': 7},
        )
        self.files = {path: path.read_bytes() for path in sorted(folder.iterdir())}

    def feed(self, random):
        path = random.choice([*self.files])
        checksum = random.choice([masked_crc, lambda data: AnyChecksum()])
        with restored(path, self.files[path]), mock.patch.object(tf_table, 'masked_crc', checksum):
            path.write_bytes(damaged(random, self.files[path]))
            names = checkpoints.parse_checkpoint_file(path.read_bytes().decode(errors='replace'))
            assert all('/' not in name and name not in ('.', '..') for name in names)
            for name in checkpoints.resumable(str(self.folder)):
                with contextlib.suppress(UserError):
                    assert checkpoints.restore_state(str(self.folder / name)) == {'step': 7}
            bundle = weights.open_bundle(str(self.folder))
            assert os.path.dirname(bundle.prefix) == str(self.folder)
            for name in itertools.islice(bundle, 50):
                with contextlib.suppress(UserError):
                    assert bundle[name].nbytes <= 200


class AnyChecksum(int):
    """Lets damage through to the parsers."""

    def __ne__(self, other):
        return False


class BytePairs:
    """encoder.json and vocab.bpe of a small vocabulary."""

    inputs = 1_750

    def __init__(self, folder):
        self.folder, self.merges = folder, MERGES
        self.encoding = write_byte_pairs(folder)
        self.vocab = json.loads((folder / 'encoder.json').read_text())

    def feed(self, random):
        encodings._byte_pair_encoder.cache_clear()
        merges, vocab = self.merges, json.dumps(self.vocab).encode()
        if random.random() < 0.3:
            vocab = json_bytes(random, self.vocab)
        elif random.random() < 0.5:
            merges = damaged(random, self.merges)
        else:  # another vocabulary, and merges that belong to it
            piece = ''.join(
                random.choices(['é', '\xad', '中', ' ', 't', '\r', 'Ġ', '\x85', ''], k=2)
            )
            merges = self.merges.replace('Ġ the'.encode(), piece.encode())
            vocab = json.dumps(
                {{'Ġthe': piece}.get(name, name): i for name, i in self.vocab.items()}
            ).encode()
        (self.folder / 'encoder.json').write_bytes(vocab)
        (self.folder / 'vocab.bpe').write_bytes(merges)
        encoder = self.encoding.get_encoder()
        assert encoder.decode(encoder.encode('and the thé\0')) == 'and the thé\0'


class CommandLine:
    """Words after ./launch.py and ./sample.py."""

    inputs = 4_000
    words = [
        'train_policy',
        'train_reward',
        'export',
        'resume',
        'sample',
        'evaluate',
        'test',
        'cnndm',
        'first',
        '--',
        '-h',
        '--help',
        '--dry_run',
        '--mpi',
        '1',
        '--ppo.lr',
        '--nolr',
        '..',
        '/x',
        '-x',
        '=',
        '""',
        "'",
        '--rewards.adaptive_kl',
    ]
    values = [
        '1',
        '0',
        '-1',
        '1e3',
        '1e999',
        'nan',
        'None',
        'on',
        'off',
        '',
        '"',
        '9' * 5000,
        '0x' + 'f' * 5000,
        '(' * 200,
        '-' * 300 + '1',
        '[' * 90,
        '\udcff',
        '\n',
        'x=y',
        '1_0',
        '٣',
        '"\\ud800"',
        "b'x'",
        '1j',
        '{1}',
        '...',
    ]

    def __init__(self, folder):
        self.folder = folder
        self.fields = [
            *launch.cli.commands['train_policy'].fields,
            *launch.cli.commands['train_reward'].fields,
        ]

    def feed(self, random):
        words = []
        if random.random() < 0.8:
            words = [
                random.choice(['train_policy', 'train_reward']),
                random.choice(['test', 'sentiment']),
                'first',
                '--dry_run',
            ]
        for _ in range(random.randrange(4)):
            option = f'--{random.choice(self.fields)}'
            words.append(
                random.choice(
                    [random.choice(self.words), option, f'{option}={random.choice(self.values)}']
                )
            )
        if random.random() < 0.2:
            random.shuffle(words)
        out, err = io.TextIOWrapper(io.BytesIO(), encoding='utf-8'), io.StringIO()
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            mock.patch.object(jobs, 'start_job'),
        ):
            try:
                random.choice([launch.cli, launch.cli, sample.cli]).main(
                    [*words, f'--save_dir={self.folder}']
                )
            except SystemExit as e:
                assert e.code == 2 and err.getvalue().splitlines()[-1].startswith('error: '), (
                    err.getvalue()
                )
                raise UserError(err.getvalue()) from e


class StorageNames:
    """Paths and URLs: what is let through has its place in the cache."""

    inputs = 10_000
    parts = [
        'az://',
        'gs://',
        'https://',
        'openaipublic',
        '.blob.core.windows.net',
        'gpt-2',
        'lm-human-preferences',
        '/',
        '/',
        '..',
        '.',
        '%2e%2e',
        '%2f',
        '%00',
        '\0',
        '\\',
        '~',
        'a',
        'x.json',
        '?',
        '#',
        '\n',
        '\udcff',
        '//',
        ':',
        '@',
        'x' * 300,
        '%',
        '/etc',
        '.lock',
        '.part',
    ]

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
                place = os.path.normpath(storage.paths.Blob(path).cached)
                assert (
                    place.startswith(os.path.join(self.root, ''))
                    and place == storage.paths.Blob(path).cached
                )
            assert storage.read_text(path) == 'here'


@contextlib.contextmanager
def restored(path, data):
    try:
        yield
    finally:
        path.write_bytes(data)


def launch_hparams():
    (trial,) = launch.policy_experiments['test']
    hparams = policy_options.HParams()
    hparams.override_from_dict({name: value for name, value, _ in trial if name})
    return hparams


TARGETS = [
    Labels,
    Queries,
    ModelDirectory,
    RunHparams,
    Checkpoint,
    BytePairs,
    CommandLine,
    StorageNames,
]


@pytest.mark.parametrize(
    'share',
    [0.03, pytest.param(min(1, FAULTS / 16), marks=pytest.mark.slow)],
    ids=['few', 'all'],
)
@pytest.mark.parametrize('target', TARGETS)
def test_any_input(target, share, tmp_path, monkeypatch):
    monkeypatch.delenv('LMHP_GPT2_ENCODINGS', raising=False)
    parser, ended = target(tmp_path), {'well': 0, 'told': 0}

    @settings(
        max_examples=int(target.inputs * share / BATCH),
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
    assert (
        min(ended.values()) > 0
    )  # the good input among them shows that the bad is refused for its own sake


# ---------------------------------------------------------------- what was found, or thought of


def told(call, *arguments):
    """What the user is told of it, in one line."""
    with pytest.raises(UserError) as caught, little_memory():
        confined('/tmp', call, *arguments)
    assert '\n' not in str(caught.value) and len(str(caught.value)) < 1000
    return str(caught.value)


@pytest.fixture
def model_parts(tmp_path):
    """A model directory of ours and one of Hugging Face, and a function that puts one of their
    files."""
    ModelDirectory(tmp_path)

    def put(name, value):
        (tmp_path / name).write_text(value if isinstance(value, str) else json.dumps(value))
        return trained_models.TrainedModel(str(tmp_path / name.split('/')[0])).build, 'policy'

    return lambda name, value: told(lambda build, scope: build(scope=scope), *put(name, value))


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
        (
            'ours/hparams.json',
            SIZES | {'n_layer': 10**9},
            'does not hold a model of 1000000000 layers',
        ),
        (
            'ours/hparams.json',
            SIZES | {'n_embd': 1 << 20},
            'does not hold a model of 1 layers of width 1048576',
        ),
        ('ours/hparams.json', SIZES | {'n_ctx': 1 << 40}, 'and context 1099511627776'),
        ('ours/hparams.json', SIZES | {'n_head': 0}, '--n_head must be at least 1, got 0'),
        ('ours/hparams.json', SIZES | {'n_head': 3}, '--n_embd 4 is not a multiple of --n_head 3'),
        ('ours/hparams.json', SIZES | {'n_ctx': True}, 'sizes must be numbers, not true or false'),
        ('ours/hparams.json', [SIZES], 'does not hold the sizes of a model'),
        ('ours/encoding', ['test'], "unknown encoding ['test']"),
        ('ours/checkpoints/checkpoint', '\n' * 1_000_000, 'no TensorFlow checkpoint'),
        (
            'theirs/config.json',
            [],
            'config.json does not say which model it is of: it has no model_type',
        ),
        (
            'theirs/config.json',
            {'model_type': 'gpt2', 'vocab_size': 27, 'n_embd': 'x'},
            '--n_embd must be a whole number',
        ),
        (
            'theirs/config.json',
            {'model_type': 'gpt2', 'vocab_size': 27, 'n_layer': 10**9},
            'does not hold a model of',
        ),
    ],
)
def test_parts_of_models(model_parts, name, value, words):
    assert words in model_parts(name, value)


@pytest.mark.parametrize(
    'value, words',
    [
        ({'task': 5}, '--task must be on or off, got 5'),
        ({'tasks': 5}, "has no field 'tasks'"),
        ([], 'does not hold'),
        ({'task': {'query_length': -5}}, '--task.query_length must be at least 1'),
        ({'ppo': {'batch_size': 10**30}}, '--ppo.batch_size must be a number of at most 64 bits'),
    ],
)
def test_settings_of_runs(tmp_path, value, words):
    good = launch_hparams().to_nested_dict()
    if value:
        value = {
            **good,
            **{key: {**good[key], **v} if isinstance(v, dict) else v for key, v in value.items()},
        }
    (tmp_path / 'train_policy_hparams.json').write_text(json.dumps(value))
    assert words in told(run_settings.load_run_hparams, str(tmp_path))


def test_a_long_text_among_the_labels_does_not_fill_the_memory(tmp_path):
    labels = [
        {**label, 'score': 'x' * 1_000_000 if i == 7 else 'a'}
        for i, label in enumerate(LABELS * 500)
    ]
    (tmp_path / 'labels.json').write_text(json.dumps(labels))
    hparams = reward_options.HParams()
    hparams.override_from_dict(
        {
            'labels.source': str(tmp_path / 'labels.json'),
            'labels.type': 'scalar_rating',
            'batch_size': 2,
            'task.query_length': 3,
            'task.response_length': 2,
        }
    )
    assert "label 0, field 'score' must be a number" in told(
        label_files.load_labels, hparams, encodings.Test
    )


@pytest.mark.parametrize(
    'query, words',
    [
        (['a'], 'has a query that is not a list of token ids'),
        ({'a': 1}, 'has a query that is not a list of token ids'),
        ([True], 'is not a list of token ids'),
        ([28], 'token ids that are not in 0 to 26'),
        ([-1], 'not in 0 to 26'),
    ],
)
def test_queries_of_label_files(tmp_path, query, words):
    (tmp_path / 'labels.json').write_text(json.dumps([{'query': query}]))
    dataset = get_dataset('books', labels=str(tmp_path / 'labels.json'))
    sequences = dataset.sequences(
        3, mode='train', encoder=encodings.Test.get_encoder(), repeat_count=1
    )
    assert words in told(list, sequences)


@pytest.mark.parametrize('piece', ['中', '\xad', ' '])
def test_byte_pairs_of_characters_that_stand_for_no_byte(tmp_path, monkeypatch, piece):
    monkeypatch.delenv('LMHP_GPT2_ENCODINGS', raising=False)
    parts = BytePairs(tmp_path)
    (tmp_path / 'encoder.json').write_text(
        json.dumps({{'Ġthe': piece}.get(k, k): i for k, i in parts.vocab.items()})
    )
    (tmp_path / 'vocab.bpe').write_bytes(parts.merges.replace('Ġ the'.encode(), piece.encode()))
    encodings._byte_pair_encoder.cache_clear()
    assert 'do not belong together' in told(parts.encoding.get_encoder)


@pytest.mark.parametrize('posts', [{}, [1], [{'title': 'x'}], None])
def test_posts_of_other_kinds(tmp_path, monkeypatch, posts):
    (tmp_path / 'posts.json').write_text(json.dumps(posts))
    monkeypatch.setattr(tldr, 'URL', str(tmp_path / 'posts.json'))
    assert 'is not a list of posts' in told(list, tldr.tldr_generator('train'))


@pytest.mark.parametrize(
    'words, expected',
    [
        (['first', '--run.seed=0x' + 'f' * 5000], 'at most 64 bits'),
        (['\udcff'], 'NAME'),
        (['a\x1b[2J'], 'NAME'),
        (['first', '--labels.source=\udcff'], 'must be text (str)'),
        (['first', '--task.query_prefix="\\ud800"'], 'must be text (str)'),
        (['first', '--batch_size=' + '-' * 9_000 + '1'], 'must be a whole number'),
    ],
)
def test_words_of_command_lines(words, expected):
    assert expected in error_of(invoke(['train_reward', 'test', '--dry_run', *words]))


@pytest.mark.parametrize('value', ['nan', 'inf', '-inf', '1e308'])
@pytest.mark.parametrize(
    'option', ['ppo.lr', 'ppo.cliprange', 'rewards.kl_coef', 'rewards.adaptive_kl.target']
)
def test_numbers_that_no_tensor_holds(tmp_path, option, value):
    assert f'--{option} must be a finite number, got' in error_of(
        invoke(['train_policy', 'test', 'first', '--dry_run', f'--{option}', value])
    )
    hparams = launch_hparams()
    hparams.override_from_dict({option: float(value)})
    (tmp_path / 'train_policy_hparams.json').write_text(json.dumps(hparams.to_nested_dict()))
    for word in ('resume', 'evaluate'):
        assert f'.{option.split(".")[-1]} must be a finite number' in error_of(
            invoke([word, str(tmp_path)])
        )


def test_kl_target_of_nothing():
    assert 'must be at least' in error_of(
        invoke('train_policy test first --dry_run --rewards.adaptive_kl.target 0')
    )


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
    logger = Logger(str(tmp_path), 'ppo', log_interval=1, comm=LocalComm())
    confined(tmp_path, logger.purge_from, 3)
    assert sorted(path.name[-1] for path in folder.iterdir()) == ['1', '2', '3']
    assert (tmp_path / 'precious').read_text() == 'mine'


def test_labels_of_a_thousand_million_responses():
    assert 'up to 1000' in told(label_types.get, 'best_of_1000000000')


@pytest.mark.parametrize('seed', [-1, 2**32, 2**63 - 1])
def test_every_seed_is_one(seed):
    core.set_seed(seed, rank=3)


def test_a_link_in_the_place_of_a_part_is_not_followed(tmp_path):
    (tmp_path / 'precious').write_text('mine')
    os.symlink(tmp_path / 'precious', tmp_path / f'x.json.{os.getpid()}.part')
    with pytest.raises(UserError, match='cannot write'):
        storage.write_json(str(tmp_path / 'x.json'), 1)
    assert (tmp_path / 'precious').read_text() == 'mine'


def test_export_to_a_file(tmp_path):
    ModelDirectory(tmp_path)
    (tmp_path / 'file').write_text('')
    assert 'file is not empty: give a new' in error_of(
        invoke(f'export {tmp_path}/ours {tmp_path}/file')
    )


def test_lock_that_is_no_text_or_leads_elsewhere(tmp_path):
    (tmp_path / 'precious').write_text('of 8 ranks')
    (tmp_path / 'lock').write_bytes(b'\xff' * 5000)
    hparams = launch_hparams()
    hparams.run.save_dir = str(tmp_path)
    assert 'is writing this run' in told(
        lambda: run_dir.lock_run_dir(hparams, LocalComm()).__enter__()
    )
    for make in (lambda path: os.symlink(tmp_path / 'precious', path), os.mkfifo):
        os.remove(tmp_path / 'lock')
        make(tmp_path / 'lock')
        with pytest.raises(UserError, match='cannot be written'):
            run_dir.lock_run_dir(hparams, LocalComm()).__enter__()
        assert run_dir.ranks_of(str(tmp_path)) is None
    assert (tmp_path / 'precious').read_text() == 'of 8 ranks'


def test_list_of_checkpoints_that_is_a_pipe(tmp_path):
    os.mkfifo(tmp_path / 'checkpoint')
    assert 'checkpoint is not a file' in told(checkpoints.latest, tmp_path)
