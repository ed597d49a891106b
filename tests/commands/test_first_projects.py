"""First projects of a newcomer, from a CSV to an exported model, by README and what is printed."""

import json
import re
import shlex

import pytest
from click.testing import CliRunner
from command_line import invoke
from documentation import page
from tiny_causal_lms import write_chat_model

import launch
import sample

PROMPTS = 'It was late.|Who is lazy?|The fox jumps|Never mind.|Nobody answered.|Why?'.split('|')
SMALL = (
    '--mpi 1 --ppo.total_episodes 32 --ppo.batch_size 16 --ppo.samples_per_query 2'
    ' --run.sample_queries 2'
)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a tiny chat model and prompts.csv, in which the user stands."""
    folder = tmp_path / 'project'
    write_chat_model(folder / 'model')
    rows = [f'{number};"{text}"' for number, text in enumerate(PROMPTS)]
    (folder / 'prompts.csv').write_text('\ufeffid;prompt\n' + '\n'.join(rows) + '\n')
    (folder / 'prompts.test.csv').write_text('id;prompt\n9;Who is late?\n')
    monkeypatch.chdir(folder)
    return folder


TASK = (
    '--task.policy.initial_model model --task.query_dataset prompts.csv --task.query_length 24'
    ' --task.response_length 8'
)


def run(line):
    script, *words = shlex.split(line)
    result = invoke(words, sample.cli if script.endswith('sample.py') else launch.cli)
    assert result.exit_code == 0, (line, result.output)
    return result.output


def printed(output, command):
    """Return the command line for `command` that a text ends with."""
    lines = re.findall(rf'(\./(?:launch|sample)\.py {command} .*)$', output, re.M)
    assert lines, (command, output)
    return lines[-1]


def run_elsewhere(line, tmp_path, monkeypatch):
    """Run a printed command in a folder with other files of the same names."""
    elsewhere = tmp_path / 'elsewhere'
    elsewhere.mkdir(exist_ok=True)
    for name in ('prompts.csv', 'prompts.test.csv'):
        (elsewhere / name).write_text('prompt\nAnother prompt\n')
    with monkeypatch.context() as there:
        there.chdir(elsewhere)
        return run(line)


def finish(output, tmp_path, monkeypatch):
    """Run what a training prints at its end, and export its policy."""
    save_dir = tmp_path / 'runs/first'
    answers = run_elsewhere(printed(output, 'sample'), tmp_path, monkeypatch)
    assert 'Who is late?' in answers and 'Another prompt' not in answers
    run_elsewhere(printed(output, 'report'), tmp_path, monkeypatch)
    run(f'./launch.py export {save_dir} {tmp_path}/exported')
    assert (tmp_path / 'exported' / 'model.safetensors').exists()


def test_pairs_of_two_annotators(project, tmp_path, monkeypatch):
    rows = ['id,labeller,prompt,chosen,rejected']
    for number, text in enumerate(PROMPTS):
        for labeller in ('anna', 'bob'):
            rows.append(f'{number},{labeller},{text}, The dog., No{number}')
    (project / 'pairs.csv').write_text('\n'.join(rows))
    output = run(f'./launch.py import_labels chat pairs.csv labels {TASK}')
    assert '6 answers of anna added' in output and 'Not read' not in output
    train = printed(output, 'train_policy')
    report = run('./launch.py labels labels --export labels.jsonl --export_as text')
    assert printed(report, 'train_policy') == train
    exported = [json.loads(line) for line in open('labels.jsonl')]
    assert [label['id'] for label in exported] == [str(each) for each in range(6) for _ in 'ab']
    new = '--rewards.train_new_model'
    sizes = f'{SMALL} --save_dir {tmp_path}/runs --rewards.ensemble 1 {new}.epochs 1'
    assert shlex.split(train)[3] == 'labels'
    train = train.replace(' labels ', ' first ', 1)
    line = f'{train} {sizes} {new}.normalize_samples 64'
    output = run_elsewhere(line, tmp_path, monkeypatch)
    finish(output, tmp_path, monkeypatch)


def test_a_reward_of_ones_own_that_sees_the_table(project, tmp_path, monkeypatch):
    (project / 'reward.py').write_text(
        'def score(queries, responses, id):\n'
        '    short = [-len(each) / 10 for each in responses]\n'
        "    return {'short': short, 'late': [float(each) for each in id]}\n"
    )
    function = f'--rewards.function {project}/reward.py:score'
    words = f'./launch.py train_policy chat first {TASK} {function}'
    run(f'{words} --dry_run')
    run(f'{words} {SMALL} --save_dir {tmp_path}/runs')
    save_dir = tmp_path / 'runs/first'
    line = f'./launch.py resume {save_dir} {function} --ppo.total_episodes 64'
    output = run_elsewhere(line, tmp_path, monkeypatch)
    finish(output, tmp_path, monkeypatch)
    assert 'reward.py:score' in (save_dir / 'report.html').read_text()
    rows = f'--queries {project}/prompts.csv --output {tmp_path}/out.jsonl'
    run(f'./sample.py sample --save_dir {save_dir} --mpi 1 {rows}')
    lines = [json.loads(line) for line in (tmp_path / 'out.jsonl').read_text().splitlines()]
    assert [line['id'] for line in lines] == [str(each) for each in range(len(PROMPTS))]


def test_your_own_choices(project, tmp_path):
    """The eight commands of README, with a tiny model, few episodes, and a key for each answer."""
    section = page('README.md').partition('## Your own choices')[2].partition('\n## ')[0]
    lines = [line.removeprefix('    ') for line in section.splitlines() if line.startswith('    ')]
    table = [line for line in lines if not line.startswith(('model=', 'pipenv run '))]
    assert len(table) == 10
    (project / 'choices.csv').write_text('\n'.join(table))
    write_chat_model(project / 'model', positions=256)
    added = {
        'train_reward': f' --mpi 1 --save_dir {tmp_path}/train_reward',
        'train_policy': f' {SMALL} --save_dir {tmp_path}/train_policy',
        'ask': ' --count 2',
    }
    outputs = {}
    for line in lines:
        if not line.startswith('pipenv run '):
            continue
        words = line.removeprefix('pipenv run ').replace('$model', 'model')
        words = words.replace('/tmp/save', str(tmp_path))
        command = words.split()[1]
        if command == 'label':
            label = CliRunner().invoke(launch.cli, shlex.split(words)[1:], input='11')
            outputs[command] = label.output
        else:
            outputs[words] = run(words + added.get(command, ''))
    assert len(outputs) == 8
    told = '\n'.join(outputs.values())
    assert '9 answers of imported added' in told
    assert re.search(r'By cross-validation: as the labeller in \S+ % of 9 labels', told)
    parts = r'predicts these labels:\n  held out of its training: no labels\n  others: as the'
    assert re.search(rf'{parts} labeller in \S+ % of 9 labels', told)
    assert len(re.findall(r'\(score \S+, rank \S+ of 16, mean ', told)) == 2
    assert 'Saved: 2 answers in this sitting' in told
    policy = re.escape(f'best of 4 of {tmp_path}/train_policy/my-policy')
    assert re.search(rf'initial preferred to {policy}, .* \d of 2 ', told)
