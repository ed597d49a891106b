"""./launch.py doctor: a line and a fix for each fault; status 1 only if no training can start."""

import os
import types

import pytest
from command_line import invoke
from hub_server import forget
from huggingface_hub import constants

from lm_human_preferences.commands import doctor
from lm_human_preferences.distributed import launcher
from lm_human_preferences.errors import UserError
from lm_human_preferences.machine import processors, products
from lm_human_preferences.machine.processors import Processor
from lm_human_preferences.machine.products import Rates

FREE = types.SimpleNamespace(free=3 << 30)


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
    names = 'Python,packages,devices,matrix products,load,memory and disk,cache,store,hub,MPI'
    assert list(found)[:11] == [*names.split(','), 'one rank']
    assert found['one rank'] == ('ok', 'done ()')
    assert found['two by torch'] == ('ok', "done ('--mpi=2', '--run.allreduce=torch')")
    assert status == 0 and 'LMHP_OFFLINE=1' in found['store'][1]


@pytest.mark.parametrize('why_not, first', [('', 'two by horovod'), ('it is old', 'two by torch')])
def test_horovod_is_tried_where_it_suits(quick, monkeypatch, why_not, first):
    monkeypatch.setattr(doctor.horovod, 'why_not', lambda family: why_not)
    _, found = examined()
    assert list(found)[11] == first
    assert why_not in found['MPI'][1]


def test_products_and_threads_are_told(quick, monkeypatch):
    rates = Rates(default=118, onednn=57.4, bf16=0.51, error=3e-3)
    processor = Processor(processors.INTEL, 'Xeon', ('avx2', 'avx512f', 'avx512_vnni'))
    monkeypatch.setattr(processors, 'this_processor', lambda: processor)
    monkeypatch.setattr(products, 'measure', lambda: rates)
    monkeypatch.setattr(processors, 'cpu_quota', lambda: 1.5)
    _, found = examined()
    default = products.name_of('default')
    kind, told = found['matrix products']
    assert kind == 'ok' and f'fp32 118 GFLOP/s by {default} and 57.4 by oneDNN, bf16 0.51' in told
    assert f'{default} is used for fp32, as oneDNN rounds; without instructions' in told
    assert ', of which this container may take 1.5, of which one rank' in found['devices'][1]


def no_module(name):
    spec = types.SimpleNamespace(submodule_search_locations=[])
    return lambda wanted: None if wanted == name else spec


@pytest.mark.parametrize(
    'name, target, change, said, status',
    [
        ('Python', 'sys.version_info', (3, 10, 14), '3.11 to 3.14 are: `PYTHON=python3.14', 0),
        ('Python', 'sys.version_info', (3, 15, 0), '3.11 to 3.14 are: `PYTHON=python3.14', 0),
        ('packages', 'importlib.util.find_spec', no_module('tiktoken'), 'tiktoken missing: `', 1),
        ('memory and disk', 'LEAST_MEMORY', 1 << 40, 'make room', 0),
        ('memory and disk', 'shutil.disk_usage', lambda path: FREE, '3 GiB free at /tmp', 0),
        ('MPI', 'launcher.find_mpiexec', refuse, 'there is none', 0),
        ('one rank', 'step', refuse, 'there is none', 1),
        ('two by torch', 'step', lambda *options: refuse() if options else '', 'there is none', 0),
    ],
)
def test_faults(quick, monkeypatch, name, target, change, said, status):
    monkeypatch.setattr(f'lm_human_preferences.commands.doctor.{target}', change)
    found = examined()
    assert found[1][name][0] == 'problem' and said in found[1][name][1] and found[0] == status
    assert len(found[1]) >= 10  # one fault hides no other


def test_a_driver_without_a_torch_for_it(quick, monkeypatch):
    monkeypatch.setattr('torch.cuda.device_count', lambda: 0)
    monkeypatch.setattr(doctor.shutil, 'which', lambda name: name)
    monkeypatch.setattr(launcher, 'find_mpiexec', lambda: ('mpiexec', False))
    assert 'install a torch for its CUDA' in examined()[1]['devices'][1]


def test_cache_that_cannot_be_written(quick, monkeypatch, tmp_path):
    (tmp_path / 'file').write_text('')
    monkeypatch.setenv('LMHP_CACHE', str(tmp_path / 'file' / 'cache'))
    kind, text = examined()[1]['cache']
    assert kind == 'problem' and 'cannot be written (Not a directory): set LMHP_CACHE' in text


def test_what_is_promised_and_does_not_hold_here(quick, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, 'SAVES', tmp_path / 'save')
    monkeypatch.setattr(doctor, 'LEAST_DISK', 0)
    assert 'which other users cannot replace' in examined()[1]['memory and disk'][1]
    (tmp_path / 'save').mkdir()
    (tmp_path / 'save').chmod(0o777)
    (tmp_path / 'cache').mkdir()
    (tmp_path / 'cache').chmod(0o777)
    monkeypatch.setenv('LMHP_CACHE', f'{tmp_path}/cache')
    for name, check in {'save': 'memory and disk', 'cache': 'cache'}.items():
        told = f'everybody may write to {tmp_path}/{name}, and replace what is in it: what docs'
        kind, text = examined()[1][check]
        assert kind == 'problem' and text.startswith(told)
        (tmp_path / name).chmod(0o755)
    before = os.umask(0)
    try:
        found = examined()[1]
    finally:
        assert os.umask(before) == 0
    for check in ('memory and disk', 'cache'):
        assert 'the umask 000 lets everybody write' in found[check][1]


def test_store_that_answers(server, blobs):
    name = 'models/124M/hparams.json'
    blobs['openaipublic/gpt-2'][name] = b'{}'
    assert doctor._store() == 'labels and models can be downloaded'
    # By path, as a thread that an earlier test gave up on may still ask for something else.
    assert server.count('HEAD', name) == 1
    assert server.count('GET', name) == 0


def test_the_hub(hub_server, monkeypatch):
    assert doctor._hub() == 'models ORG/NAME can be downloaded'
    assert hub_server.log == ['HEAD /']
    monkeypatch.setattr(constants, 'ENDPOINT', 'http://127.0.0.1:9')
    forget()
    with pytest.raises(UserError, match='Connection refused: .* a mirror by HF_ENDPOINT; '):
        doctor._hub()
    monkeypatch.setenv('LMHP_OFFLINE', '1')
    forget()
    assert doctor._hub().startswith('not asked')


@pytest.mark.parametrize(
    'change, said',
    [
        (
            ('STEP', ['train_policy', 'test', 'x', '--ppo.nosuch=1']),
            "No such option '--ppo.nosuch'",
        ),
        (('PATIENCE', 0.01), 'not done after 0.01 s'),
    ],
)
def test_step_that_fails(monkeypatch, change, said):
    monkeypatch.setattr(doctor, *change)
    with pytest.raises(UserError, match=said):
        doctor.step('--mpi=1')


@pytest.mark.slow
def test_this_machine(monkeypatch):
    """The training steps are real ones; test_engines trains with the engines that are left out."""
    monkeypatch.setenv('LMHP_OFFLINE', '1')
    monkeypatch.setattr(doctor, 'ENGINES', ('auto', 'torch'))
    status, found = examined()
    assert status == 0
    assert list(found)[-2:] == ['one rank', 'two by torch']
    for name in ('packages', 'one rank', 'two by torch'):
        assert found[name][0] == 'ok', found
    assert 'step_time=' in found['two by torch'][1]


def test_busy_processors(monkeypatch, tmp_path):
    """Of four processors, in 100 ticks of each, one was busy by others."""
    path = tmp_path / 'stat'
    monkeypatch.setattr(processors, 'TIMES', path)
    monkeypatch.setattr(processors.os, 'cpu_count', lambda: 4)
    path.write_text('cpu 10 0 10 80 0 0 0 0 0 0\n')
    later = 'cpu 90 5 20 370 10 3 1 1 0 0\n'
    monkeypatch.setattr(processors.time, 'sleep', lambda seconds: path.write_text(later))
    assert processors.busy_processors() == pytest.approx(1.0)
    path.write_text('cpu 10 0 10 80 0 0 0 0 0 0\n')
    assert doctor._load().startswith('other processes keep 1.0 processors busy')
