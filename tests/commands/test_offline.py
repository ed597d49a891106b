"""Without a network: all files that a command lacks are named at once."""

import pytest
from command_line import invoke, last_error_of

MODEL = 'openaipublic/gpt-2/models/124M'
PUBLISHED = 'openaipublic/lm-human-preferences/runs/descriptiveness/reward_model'
CHECKPOINT = ('checkpoint', 'model.ckpt.index', 'model.ckpt.data-00000-of-00001')
OFFLINE = [
    *[f'{MODEL}/{name}' for name in ('hparams.json', *CHECKPOINT)],
    *[f'openaipublic/gpt-2/encodings/main/{name}' for name in ('encoder.json', 'vocab.bpe')],
]


@pytest.mark.parametrize(
    'command, more',
    [
        (
            'train_policy tldr x --save_dir {}',
            [
                'openaipublic/lm-human-preferences/tldr/train-subset.json',
                'openaipublic/lm-human-preferences/labels/tldr/online_45k.json',
            ],
        ),
        (
            'train_policy descriptiveness x --save_dir {} --rewards.train_new_model off',
            [
                f'{PUBLISHED}/hparams.json',
                *[f'{PUBLISHED}/checkpoints/{name}' for name in CHECKPOINT],
            ],
        ),
    ],
)
def test_all_files_that_are_missing_offline_are_named_at_once(tmp_path, monkeypatch, command, more):
    monkeypatch.setenv('LMHP_OFFLINE', '1')
    monkeypatch.setenv('LMHP_CACHE', f'{tmp_path}/cache')
    monkeypatch.delenv('LMHP_GPT2_ENCODINGS', raising=False)
    words = f'{command.format(tmp_path)} --mpi 1'
    told, _, files = last_error_of(invoke(words)).partition('; put ')
    expected = [*OFFLINE, *more]
    assert told == f'LMHP_OFFLINE=1, and the cache lacks {len(expected)} files'
    places = [file.partition(' at ')[2] for file in files.split(', ')]
    assert sorted(places) == sorted(f'{tmp_path}/cache/{file}' for file in expected)
