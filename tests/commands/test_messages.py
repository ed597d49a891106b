"""What users read when they make a mistake, in full: one line with the option or file, and the fix.

These are pinned to the letter. A test of another mistake asks for the option's name and status 2
alone (command_line.error_of), so that it outlives a better wording.
"""

import pytest
from command_line import error_of, invoke

import launch
import sample

PROGRAMS = {'./launch.py': launch.cli, './sample.py': sample.cli}
MESSAGES = {
    './launch.py nosuch': (
        "No such command 'nosuch'. The command comes first: train_reward, train_policy, resume,"
        ' export, doctor, evaluate, report, ask, import_labels, label, labels, score, figures'
    ),
    './launch.py train_policy nosuch x': (
        "no experiment 'nosuch' for train_policy: choose from sentiment, descriptiveness, cnndm,"
        ' tldr, test, mock_sentiment'
    ),
    './launch.py train_policy test': (
        'NAME missing; example: ./launch.py train_policy mock_sentiment first --mpi 1'
    ),
    './launch.py train_policy test ../x': (
        "NAME '../x' must be a relative path without .., of at most 255 characters: it is joined to"
        ' --save_dir'
    ),
    './launch.py train_policy test x --ppo.lrr 1': (
        'no such option: --ppo.lrr (did you mean --ppo.lr?)'
    ),
    './launch.py train_policy test x --ppo.lr -1': '--ppo.lr must be at least 0, got -1.0',
    './launch.py train_policy test x --mpi 0': '--mpi must be at least 1, got 0',
    './launch.py train_policy test x --run.precision fp8': (
        '--run.precision fp8 is none of fp32, tf32, bf16'
    ),
    './launch.py train_policy test x --ppo.batch_size 7 --ppo.nminibatches 2': (
        '--ppo.batch_size 7 is not a multiple of --ppo.nminibatches 2: take 6 or 8'
    ),
    './launch.py train_reward test x --labels.type best_of': (
        "--labels.type 'best_of' is none of best_of_N (as in best_of_4, up to 1000), scalar_rating,"
        ' scalar_compare'
    ),
    './launch.py evaluate': (
        'SAVE_DIR missing; example: ./launch.py evaluate /tmp/save/train_policy/first'
    ),
    './sample.py sample': (
        '--save_dir missing: the directory of a run of train_policy, such as'
        ' /tmp/save/train_policy/NAME'
    ),
}


@pytest.mark.parametrize('command', MESSAGES)
def test_message(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program, *words = command.split()
    if {'train_policy', 'train_reward'} & set(words):
        words.append(f'--save_dir={tmp_path}')
    assert error_of(invoke(words, PROGRAMS[program])) == MESSAGES[command]
    assert list(tmp_path.iterdir()) == []


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
            'train_reward descriptiveness x --save_dir {}',
            ['openaipublic/lm-human-preferences/labels/descriptiveness/offline_5k.json'],
        ),
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
        (
            'ask cnndm {}/folder',
            ['openaipublic/lm-human-preferences/datasets/cnndm/url_lists/all_train.txt'],
        ),
    ],
)
def test_all_files_that_are_missing_offline_are_named_at_once(tmp_path, monkeypatch, command, more):
    monkeypatch.setenv('LMHP_OFFLINE', '1')
    monkeypatch.setenv('LMHP_CACHE', f'{tmp_path}/cache')
    monkeypatch.delenv('LMHP_GPT2_ENCODINGS', raising=False)
    mpi = '' if command.startswith('ask') else ' --mpi 1'
    result = invoke(command.format(tmp_path) + mpi)
    assert result.exit_code == 2
    told, _, files = result.stderr.splitlines()[-1].partition('; put ')
    expected = [*OFFLINE, *more]
    assert told == f'error: LMHP_OFFLINE=1, and the cache lacks {len(expected)} files'
    places = [file.partition(' at ')[2] for file in files.split(', ')]
    assert sorted(places) == sorted(f'{tmp_path}/cache/{file}' for file in expected)
