"""Commands with a reward that is a head on the frozen initial model's hidden states."""

import contextlib
import io
import json
import re
import shutil

import numpy as np
import pytest
from command_line import error_of, invoke, last_error_of, succeed
from documentation import fenced
from events import events_of
from tiny_causal_lms import write_chat_model

import sample
from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.tf_bundle import Bundle
from lm_human_preferences.errors import UserError
from lm_human_preferences.language import encodings
from lm_human_preferences.lm_tasks import TaskHParams
from lm_human_preferences.reward_sources import loading

QUERIES = [f'Who is {name}?' for name in ('late', 'quick', 'lazy', 'brown', 'there', 'nobody')]
NEW = '--rewards.train_new_model.'
SIZES = '--task.query_length 24 --task.response_length 8'


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """A chat policy that learned from some of eleven labels: its folder, and what was printed."""
    folder = tmp_path_factory.mktemp('frozen')
    model = write_chat_model(folder / 'model')
    texts = [json.dumps(query) for query in QUERIES]
    (folder / 'queries.jsonl').write_text('\n'.join(texts))
    (folder / 'queries.test.jsonl').write_text('"Who jumps?"\n"Who said so?"\n')
    pairs = []
    for number, query in enumerate(QUERIES * 2):
        chosen, rejected = f' the fox {number}', f' a dog, {number} twice'
        pairs.append(json.dumps({'prompt': query, 'chosen': chosen, 'rejected': rejected}))
    (folder / 'pairs.jsonl').write_text('\n'.join(pairs))
    task = (
        f'--task.policy.initial_model {model} --task.query_dataset {folder}/queries.jsonl {SIZES}'
    )
    done = succeed(
        f'train_policy chat run --mpi 1 --save_dir {folder} {task} --ppo.total_episodes 64'
        f' {NEW}features frozen {NEW}labels.source {folder}/pairs.jsonl'
        f' {NEW}labels.type best_of_2 {NEW}labels.num_train 11 {NEW}labels.held_out 0.3'
    )
    return folder, done.stdout


def test_there_is_no_network_but_the_policy_and_the_reference(run):
    folder, printed = run
    (held_out,) = re.findall(r'Held out: (\d) of 11 labels', printed)
    assert f'A head on frozen hidden states learned {11 - int(held_out)} labels' in printed
    assert re.search(r'By cross-validation: as the labeller in \S+ % of \d labels; chance', printed)
    assert re.search(rf'held out: as the labeller in \S+ % of {held_out} labels \(', printed)
    logged = events_of(folder / 'run/tb/reward_model')
    for way in ('held_out', 'cross_validated'):
        assert f'train_reward/{way}/accuracy' in logged
    spread = events_of(folder / 'run/tb/ppo')['objective/score_std'][-1][1]
    assert re.search(r'step +episodes +score +spread +KL ', printed)
    assert re.search(rf' 1/1 +64 +\S+ +{spread:.2f} ', printed) and spread > 0
    bundle = Bundle(checkpoints.latest(f'{folder}/run/policy/checkpoints'))
    scopes = {name.split('/')[0] for name in bundle}
    assert scopes.isdisjoint({'reward_model'}) and {'policy', 'ref_policy'} <= scopes
    assert not (folder / 'run/reward_model/checkpoints').exists()


def test_it_goes_on_as_it_began(run):
    folder, _ = run
    head = (folder / 'run/reward_model/frozen_head.safetensors').read_bytes()
    resumed = succeed(f'resume {folder}/run --ppo.total_episodes 128')
    assert 'learned' not in resumed.stdout
    assert (folder / 'run/reward_model/frozen_head.safetensors').read_bytes() == head
    succeed(f'report {folder}/run')
    page = (folder / 'run/report.html').read_text()
    assert re.search(r'labels it had not seen</th>\s*<td[^>]*>\d+ of \d+', page)


def test_a_head_whose_file_is_missing_is_said(run, tmp_path):
    folder, _ = run
    (tmp_path / 'text.jsonl').write_text('{"query": "Who?", "response": " the fox"}\n')
    shutil.copytree(folder / 'run', tmp_path / 'run')
    file = tmp_path / 'run/reward_model/frozen_head.safetensors'
    file.unlink()
    for name in ('run', 'run/reward_model'):
        told = error_of(invoke(f'score {tmp_path}/{name} {tmp_path}/text.jsonl'))
        assert 'frozen_head.safetensors: restore the files, or train the model again' in told
    told = error_of(invoke(f'evaluate {tmp_path}/run --queries 2 --samples 64'))
    assert str(file) in told and told.endswith('or train the head again')


def test_commands_that_score_know_it(run, tmp_path):
    folder, _ = run
    words = f'sample --save_dir {folder}/run --nsamples 2 --mpi 1 --output {tmp_path}/samples.jsonl'
    invoke(words, sample.cli)
    for path in (tmp_path / 'samples.jsonl', folder / 'run/samples.jsonl'):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert all(row['score_std'] > 0 for row in rows)
        assert list(rows[0])[-3:] == ['score', 'score_std', 'kl']
    results = succeed(f'evaluate {folder}/run --queries 2 --samples 64 --judge {folder}/run')
    assert 'reward model' in results.stdout and 'judge' in results.stdout
    with pytest.raises(UserError, match="has the encoding .*, not 'test'"):
        loading.load_judge(f'{folder}/run', encodings.Test, TaskHParams())


def test_an_export_has_lines_that_compute_it(run, tmp_path):
    folder, _ = run
    (tmp_path / 'text.jsonl').write_text('{"query": "Who is late?", "response": " the fox"}\n')
    expected = json.loads(succeed(f'score {folder}/run {tmp_path}/text.jsonl').stdout)
    succeed(f'export {folder}/run/reward_model {tmp_path}/exported')
    code = fenced(tmp_path / 'exported/README.md', 'python')
    code = code.replace('ORG/NAME', f'{tmp_path}/exported').replace('A question', 'Who is late?')
    found = {}
    with contextlib.redirect_stderr(io.StringIO()):
        exec(code, found)
        of_texts = found['AutoTokenizer'].from_pretrained(found['folder'], subfolder='texts')

    def score(response):
        return found['reward_of'](found['context'], response).item()

    (ends,) = map(json.loads, re.findall(r'token in (\[\d.*\])\]', code))
    whole = [*of_texts(' the fox')['input_ids'], ends[0]]
    assert score(whole) == pytest.approx(expected['score'], abs=1e-3)
    assert len(found['responses']) == 16
    assert score(found['best']) == max(map(score, found['responses']))
    assert all(set(ends).isdisjoint(each[:-1]) for each in found['responses'])
    again = json.loads(succeed(f'score {tmp_path}/exported {tmp_path}/text.jsonl').stdout)
    assert again['score'] == pytest.approx(expected['score'], abs=1e-3)


def test_a_trained_head_is_given_to_another_policy(run, tmp_path):
    folder, _ = run
    task = (
        f'--task.policy.initial_model {folder}/model --task.query_dataset {folder}/queries.jsonl'
        f' {SIZES}'
    )
    given = f'--rewards.trained_model {folder}/run --ppo.total_episodes 64'
    words = f'train_policy chat second --mpi 1 --save_dir {tmp_path} {task} {given}'
    assert '--rewards.ensemble 2: ' in error_of(invoke(f'{words} --rewards.ensemble 2'))
    succeed(words)
    other = write_chat_model(tmp_path / 'other', seed=1)
    task = task.replace(f'{folder}/model', str(other))
    refused = invoke(f'train_policy chat third --mpi 1 --save_dir {tmp_path} {task} {given}')
    assert 'is a head on hidden states of' in last_error_of(refused)


def test_a_head_is_fitted_again_while_the_policy_trains(run, tmp_path):
    folder, _ = run
    task = f'--task.policy.initial_model {folder}/model --task.query_dataset {folder}/queries.jsonl'
    online = '--rewards.online.labels 24 --rewards.online.initial 16 --rewards.online.retrainings 1'
    done = succeed(
        f'train_policy chat run --mpi 1 --save_dir {tmp_path} {task} {SIZES} --run.save_interval 2'
        f' {NEW}features frozen {NEW}labels.type best_of_2 {online}'
        ' --rewards.online.source test'
        ' --ppo.total_episodes 192'
    )
    assert 'reward model 2 of 2' in done.stdout
    saved = tmp_path / 'run/policy/checkpoints'
    whole = Bundle(checkpoints.latest(str(saved)))
    expected = {name: np.array(whole[name]) for name in whole if 'time' not in name}
    head = (tmp_path / 'run/reward_model/frozen_head.safetensors').read_bytes()
    for path in saved.glob('model.ckpt-3.*'):
        path.unlink()
    succeed(f'resume {tmp_path}/run')
    again = Bundle(checkpoints.latest(str(saved)))
    for name, values in expected.items():
        np.testing.assert_array_equal(again[name], values, err_msg=name)
    assert (tmp_path / 'run/reward_model/frozen_head.safetensors').read_bytes() == head


def test_answers_that_prefer_nothing_end_no_run(tmp_path):
    """It ends at step 0, before the first answers, and goes on with a head that scores 0."""
    code = 'def score(queries, responses): return [0.0] * len(queries)'
    (tmp_path / 'nothing.py').write_text(code)
    begun = invoke(
        f'train_policy test run --mpi 1 --save_dir {tmp_path} {NEW}features frozen'
        ' --rewards.online.labels 40 --rewards.online.initial 6 --rewards.online.retrainings 1'
        ' --rewards.online.ties true --rewards.online.patience 0.0001 --ppo.total_episodes 128'
    )
    assert '6 of 6 labels are still missing; step 0 is saved' in last_error_of(begun)
    succeed(
        f'label {tmp_path}/run/labels --labeller robot --simulate on'
        f' --simulate.reward {tmp_path}/nothing.py:score'
    )
    waiting = last_error_of(invoke(f'resume {tmp_path}/run'))
    assert 'labels are still missing; step ' in waiting and 'step 0' not in waiting


@pytest.mark.parametrize('more', ['--epochs 2', '--task.response_length 1'])
def test_what_a_head_does_not_have_is_refused(more):
    words = f'train_reward test run {more} --features frozen --dry_run'
    assert '--features frozen' in error_of(invoke(words))
