"""./launch.py doctor: a line and a fix for each fault; status 1 only if no training can start."""

import importlib.metadata

import pytest
from command_line import invoke

from lm_human_preferences.commands import doctor
from lm_human_preferences.errors import UserError


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setenv('LMHP_OFFLINE', '1')
    monkeypatch.setattr(doctor, 'step', lambda *options: f'done {options}')


def examined():
    result = invoke('doctor')
    *lines, _ = result.stdout.splitlines()
    words = [line.partition(': ') for line in lines]
    return result.exit_code, {
        head.split(maxsplit=1)[1]: (head.split()[0], text) for head, _, text in words
    }


def refuse(*args, **settings):
    raise UserError('there is none')


def test_all_is_named(quick):
    status, found = examined()
    names = 'packages,devices,memory and disk,MPI,one rank'
    assert list(found)[:5] == names.split(',')
    assert found['one rank'] == ('ok', 'done ()')
    assert found['two by torch'] == ('ok', "done ('--mpi=2', '--run.allreduce=torch')")
    assert status == 0


@pytest.mark.parametrize('spec, first', [('there', 'two by horovod'), (None, 'two by torch')])
def test_horovod_is_tried_where_it_is(quick, monkeypatch, spec, first):
    monkeypatch.setattr(doctor.importlib.util, 'find_spec', lambda name: spec)
    assert list(examined()[1])[5] == first
    monkeypatch.setattr(doctor.horovod, 'is_usable', lambda family: False)
    assert 'torch, as Horovod is not compiled (tools/horovod.sh)' in examined()[1]['MPI'][1]


def no_package(name):
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize(
    'name, target, change, said, status',
    [
        ('packages', 'importlib.metadata.version', no_package, 'PackageNotFoundError: No', 1),
        ('memory and disk', 'LEAST_MEMORY', 1 << 40, 'make room', 0),
        ('memory and disk', 'storage.free_bytes', lambda path: 3 << 30, '3 GiB free at /tmp', 0),
        ('MPI', 'launch_methods.mpiexec_words', refuse, 'there is none', 0),
        ('two by torch', 'step', lambda *options: refuse() if options else '', 'there is none', 0),
    ],
)
def test_faults(quick, monkeypatch, name, target, change, said, status):
    monkeypatch.setattr(f'lm_human_preferences.commands.doctor.{target}', change)
    found = examined()
    assert found[1][name][0] == 'problem' and said in found[1][name][1] and found[0] == status
    assert len(found[1]) >= 6  # one fault hides no other


def test_a_driver_without_a_torch_for_it(quick, monkeypatch):
    monkeypatch.setattr('torch.cuda.device_count', lambda: 0)
    monkeypatch.setattr(doctor.shutil, 'which', lambda name: name)
    assert 'install a torch for the CUDA of this' in examined()[1]['devices'][1]


def test_cache_that_cannot_be_written(quick, monkeypatch, tmp_path):
    (tmp_path / 'file').write_text('')
    monkeypatch.setenv('LMHP_CACHE', str(tmp_path / 'file' / 'cache'))
    kind, text = examined()[1]['memory and disk']
    assert kind == 'problem' and 'cannot be written: Not a directory; set LMHP_CACHE' in text


def test_step_that_fails(monkeypatch):
    monkeypatch.setattr(doctor, 'STEP', 'train_policy test x --ppo.nosuch=1')
    with pytest.raises(UserError, match="No such option '--ppo.nosuch'"):
        doctor.step('--mpi=1')


@pytest.mark.slow
def test_this_machine(monkeypatch):
    """The training step is a real one; test_engines trains with several ranks."""
    monkeypatch.setenv('LMHP_OFFLINE', '1')
    monkeypatch.setattr(doctor, 'ENGINES', ('auto',))
    status, found = examined()
    assert status == 0
    assert found['packages'][0] == found['one rank'][0] == 'ok', found
    assert 'step_time=' in found['one rank'][1]
