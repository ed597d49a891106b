"""Waiting of OpenMP's threads: less spinning where other processes need the processors."""

import ctypes
import threading

import pytest
from launched import eventually

from lm_human_preferences.machine import threads


class OpenMp:
    def __init__(self):
        self.omp_get_thread_num = object()
        self.teams = []

    def omp_get_num_procs(self):
        return 2

    def GOMP_parallel(self, work, data, size, flags):
        self.teams.append((threading.current_thread(), work, size))


def test_a_spare_team_is_there_while_it_is_crowded():
    openmp = OpenMp()
    spare = threads.SpareTeam(openmp)
    shares = [0, threads.CROWDED, threads.CROWDED + 0.01, 1, threads.FREE + 0.01]
    for share in shares:
        threads._adjust(spare, share)
    eventually(lambda: openmp.teams, 10)
    ((holder, work, size),) = openmp.teams
    assert work is openmp.omp_get_thread_num and size == 2 and holder.is_alive()
    threads._adjust(spare, threads.FREE - 0.01)
    holder.join(10)
    assert not holder.is_alive()
    threads._adjust(spare, 1)
    eventually(lambda: len(openmp.teams) == 2, 10)
    spare.close()


@pytest.mark.parametrize('name', threads.WAITING_VARIABLES)
def test_what_the_user_says_about_waiting_prevails(name, monkeypatch):
    watched = []
    monkeypatch.setattr(threads, 'spin_less_where_crowded', lambda: watched.append(1))
    monkeypatch.setattr(threads.torch, 'get_num_threads', lambda: 2)
    monkeypatch.setattr(threads.torch, 'set_num_threads', lambda count: None)
    for variable in threads.WAITING_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    threads.limit_alone()
    monkeypatch.setenv(name, '1')
    threads.limit_alone()
    assert watched == [1]


def test_libgomp_takes_a_spare_team():
    try:
        openmp = ctypes.CDLL('libgomp.so.1')
    except OSError:
        pytest.skip('there is no libgomp here')
    spare = threads.SpareTeam(openmp)
    spare.open()
    spare.close()


def test_the_seconds_that_a_process_has_waited_grow():
    before = threads.seconds_waited()
    assert 0 <= before <= threads.seconds_waited() < 10**6
