"""Other users of this host: folders that they own or may write to."""

import os

import pytest
from command_line import invoke, last_error_of
from experiments import resolved

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.runs import run_dir

NEW = ['train_policy', 'test', 'x', '--mpi=1', '--rewards.train_new_model=off']
NEW += ['--rewards.trained_model=test']


@pytest.fixture
def theirs(monkeypatch):
    """Gives a path to another user; without the right to do so, this user becomes another."""

    def give(path):
        if os.geteuid() == 0:
            os.chown(path, 12345, 12345, follow_symlinks=False)
        else:
            monkeypatch.setattr(os, 'geteuid', lambda: 12345)

    return give


@pytest.fixture
def shared(tmp_path):
    """A folder like /tmp: others may make folders there, but not replace ours."""
    (tmp_path / 'shared').mkdir()
    (tmp_path / 'shared').chmod(0o1777)
    return tmp_path / 'shared'


def test_a_run_is_not_kept_where_another_user_could_replace_it(shared, theirs):
    (shared / 'save').mkdir()
    (shared / 'save').chmod(0o777)
    told = f'--save_dir: everybody may write to {shared}/save, and replace what is in it: give a'
    for more in ([], ['--dry_run']):
        line = last_error_of(invoke([*NEW, f'--save_dir={shared}/save/runs', *more]))
        assert line.startswith(told)
    (shared / 'save').chmod(0o755)
    assert storage.open_to_others(f'{shared}/save/runs/x') is None
    theirs(shared / 'save')
    hparams = resolved('train_policy', 'test')
    hparams.run.save_dir = f'{shared}/save/runs/x'
    with pytest.raises(UserError, match=f'{shared}/save belongs to another user, who could'):
        run_dir.check_directory(hparams.run.directory)
    assert not (shared / 'save/runs').exists()


def test_links_of_others_and_folders_that_are_sticky(shared, theirs, tmp_path, monkeypatch):
    (tmp_path / 'own').mkdir()
    (shared / 'link').symlink_to(tmp_path / 'own')
    (shared / 'sticky').mkdir()
    (shared / 'sticky').chmod(0o1777)
    for place in ('link', 'sticky', 'new/below'):
        assert storage.open_to_others(f'{shared}/{place}/run') is None
    (tmp_path / 'to others').symlink_to(shared / 'open')
    (shared / 'open').mkdir()
    (shared / 'open').chmod(0o707)
    assert storage.open_to_others(f'{tmp_path}/to others/run') is not None
    (shared / 'run').mkdir()
    (shared / 'run').chmod(0o777)
    assert storage.open_to_others(f'{shared}/run') is not None  # itself
    with monkeypatch.context() as patch:  # a volume of a container; /tmp may be a mount, too
        patch.setattr(os.path, 'ismount', lambda path: str(path).startswith(str(shared)))
        assert storage.open_to_others(f'{shared}/run') is None
        (shared / 'foreign').mkdir()
        theirs(shared / 'foreign')
        assert storage.open_to_others(f'{shared}/foreign') is not None
    theirs(shared / 'link')
    assert 'link belongs to another' in str(storage.open_to_others(f'{shared}/link/run'))
    theirs(shared / 'sticky')
    assert storage.open_to_others(f'{shared}/sticky/run') is not None
