"""Files, templates, downloads and clients of others that would not end, or lead elsewhere."""

import os

import pytest
from command_line import invoke, last_error_of, succeed
from label_folders import make_folder
from tiny_causal_lms import save, tiny
from tiny_tokenisers import write_byte_level

from lm_human_preferences import errors, storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.language.texts import tokenisers
from lm_human_preferences.language.texts.chat import ChatTemplate
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.reward_sources import classifier
from lm_human_preferences.utils import rendering

NEW = ['train_policy', 'test', '--mpi=1', '--rewards.train_new_model=off']
NEW += ['--rewards.trained_model=test', '--ppo.total_episodes=64', '--run.console=original']


@pytest.mark.parametrize('leads', ['to files', 'nowhere'])
def test_the_answers_of_a_folder_are_not_written_elsewhere(tmp_path, leads):
    make_folder(tmp_path / 'f', 2)
    (tmp_path / 'f/answers').rmdir()
    (tmp_path / 'f/answers').symlink_to(tmp_path / 'elsewhere')
    if leads == 'to files':
        (tmp_path / 'elsewhere').mkdir()
    for words in (['label', '--labeller=anna'], ['labels']):
        line = last_error_of(invoke([*words, f'{tmp_path}/f']))
        assert line.startswith(f'{tmp_path}/f/answers is a link to a folder elsewhere')
    assert not [*(tmp_path / 'elsewhere').glob('*')]
    (tmp_path / 'f/answers').unlink()
    (tmp_path / 'f/kept').mkdir()
    (tmp_path / 'f/answers').symlink_to('kept')
    assert invoke(['label', '--labeller=anna', f'{tmp_path}/f']).exit_code == 0


@pytest.mark.parametrize('name', ['questions.jsonl', 'answers/anna.jsonl'])
def test_a_pipe_in_a_folder_is_a_line(tmp_path, name):
    make_folder(tmp_path / 'f', 2)
    (tmp_path / 'f' / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / 'f' / name)
    for words in (['label', '--labeller=anna'], ['labels']):
        line = last_error_of(invoke([*words, f'{tmp_path}/f']))
        assert line.startswith(f'{tmp_path}/f/{name} cannot be read: it is a pipe or a device')


def test_a_report_waits_for_no_pipe(tmp_path):
    assert invoke([*NEW, 'x', f'--save_dir={tmp_path}']).exit_code == 0
    for kind in ('policy/checkpoints/*.index', 'tb/ppo/*'):
        (file,) = (tmp_path / 'x').glob(kind)
        file.unlink()
        os.mkfifo(file)
    done = invoke(['report', f'{tmp_path}/x', f'--output={tmp_path}/report.html'])
    assert done.exit_code == 0, done.output


def test_samples_of_a_run_are_not_written_elsewhere(tmp_path):
    """Not through a link that leads nowhere yet, either."""
    new = [*NEW, 'x', f'--save_dir={tmp_path}']
    assert invoke(new).exit_code == 0
    (tmp_path / 'x/samples.jsonl').unlink()
    (tmp_path / 'x/samples.jsonl').symlink_to(tmp_path / 'elsewhere')
    line = last_error_of(invoke(['resume', f'{tmp_path}/x', '--ppo.total_episodes=128']))
    assert line.startswith(f'{tmp_path}/x/samples.jsonl cannot be written: it is a symbolic link')
    assert not (tmp_path / 'elsewhere').exists()


def test_folders_of_a_run_do_not_lead_to_another_run(tmp_path):
    for name in ('mine', 'theirs'):
        succeed([*NEW, name, f'--save_dir={tmp_path}'])
    aside, kept = tmp_path / 'aside', tmp_path / 'mine/kept'
    for link in ('policy/checkpoints', 'policy', 'tb'):
        own, other = tmp_path / 'mine' / link, tmp_path / 'theirs' / link
        before = sorted(os.walk(other))
        own.rename(aside)
        own.symlink_to(other)
        resume = ['resume', f'{tmp_path}/mine', '--ppo.total_episodes=192']
        for words in (resume, [*NEW, 'mine', f'--save_dir={tmp_path}', '--overwrite']):
            line = last_error_of(invoke(words))
            assert line.startswith(f'--save_dir: {own} is a link to a folder outside of the run')
        assert sorted(os.walk(other)) == before
        own.unlink()
        aside.rename(own)
    own.rename(kept)
    own.symlink_to('kept')  # within the run
    succeed(['resume', f'{tmp_path}/mine', '--ppo.total_episodes=128'])


def test_weights_are_not_read_from_a_pipe(tmp_path):
    save(tiny('llama'), tmp_path)
    storage.write_json(f'{tmp_path}/encoding', 'test')
    (tmp_path / 'model.safetensors').unlink()
    os.mkfifo(tmp_path / 'model.safetensors')
    with pytest.raises(UserError, match=r'model\.safetensors is not a file'):
        TrainedModel(str(tmp_path)).build(scope='policy')


def test_no_file_of_this_machine_is_copied_with_a_model(tmp_path):
    """Behind a link in a model of others; the hub's cache has links of its own."""
    name = 'chat_template.jinja'
    (tmp_path / 'private').write_text('{}')
    model = tmp_path / 'models--a--b/snapshots/123'
    write_byte_level(model)
    (model / name).symlink_to(tmp_path / 'private')
    encoding = tokenisers.read(str(model))
    with pytest.raises(UserError, match=f'^{model / name} is a link to {tmp_path}/private, out'):
        encoding.copy_files(str(tmp_path / 'run'))
    assert not (tmp_path / 'run' / name).exists()
    (model / name).unlink()
    blobs_of_cache = tmp_path / 'models--a--b/blobs'
    blobs_of_cache.mkdir()
    (tmp_path / 'private').rename(blobs_of_cache / 'f00')
    (model / name).symlink_to(blobs_of_cache / 'f00')
    encoding = tokenisers.read(str(model))
    encoding.copy_files(str(tmp_path / 'run'))
    assert (tmp_path / 'run' / name).read_text() == '{}'


LOOPS = '{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}'
TOO_MUCH = {
    'loops': (LOOPS, 'it takes more than 0.3 s'),
    # Jinja computes it before it renders, and goes on where that fails.
    'folded': ('{% if 9**(9**9) > 3 %}{% endif %}', 'it takes more than 0.3 s'),
    'memory': ("{{ 'a' * 2000000000 }}", 'MemoryError'),
}


@pytest.mark.parametrize('kind', TOO_MUCH)
def test_a_template_has_little_time_and_memory(tmp_path, kind, monkeypatch):
    assert (rendering.SECONDS, rendering.MEGABYTES) == (2.0, 512)
    monkeypatch.setattr(rendering, 'SECONDS', 0.3)
    rendering._renderer.cache_clear()  # a process with that limit
    template, told = TOO_MUCH[kind]
    directory = write_byte_level(tmp_path, bos_token='<s>', chat_template=template)
    encoder = tokenisers.read(directory).get_encoder()
    with pytest.raises(UserError, match=f'the chat template of the model fails: {told}'):
        ChatTemplate(encoder, '', '', 4)
    directory = write_byte_level(tmp_path / 'good', chat_template='{{ messages[0].content }}')
    template = ChatTemplate(tokenisers.read(directory).get_encoder(), '', '', 4)
    assert template.context((70,)) == [70]
    rendering._renderer.cache_clear()  # other tests have more time


class PanicException(BaseException):
    """As pyo3 has it, which has no module to import it from."""


def panic(*_, **__):
    raise PanicException('called `Option::unwrap()` on a `None` value')


def test_a_panic_of_a_tokeniser_is_a_line(monkeypatch, tmp_path):
    directory = write_byte_level(tmp_path, chat_template='{{ messages[0].content }}')
    encoder = tokenisers.read(directory).get_encoder()
    template = ChatTemplate(encoder, '', '', 4)

    class Panicking:
        encode = decode = decode_batch = __call__ = panic
        encode_special_tokens = True

    encoder.parts = encoder.own = Panicking()
    template.encoder = encoder
    reward = object.__new__(classifier.Classifier)
    reward.name, reward._chat, reward._tokeniser = 'it', False, Panicking()
    for fails in (
        lambda: encoder.encode('a'),
        lambda: encoder.encode_whole('a'),
        lambda: encoder.decode([1]),
        lambda: encoder.single_token('a'),
        lambda: template.context((1,)),
        lambda: reward._tokens([]),
    ):
        with pytest.raises(UserError, match='unwrap'):
            fails()
    monkeypatch.setattr(tokenisers, 'without_prefix_space', panic)
    tokenisers._encoding.cache_clear()
    with pytest.raises(UserError, match='cannot be used: .*unwrap'):
        tokenisers.read(directory)
    with pytest.raises(KeyboardInterrupt), errors.no_panics():
        raise KeyboardInterrupt
