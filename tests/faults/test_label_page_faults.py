"""The page's server and the terminal, killed at random moments; requests from elsewhere.

benchmarks/labelling.py does the same many more times.
"""

import page_faults
import pytest


@pytest.mark.slow
def test_a_kill_of_the_server_loses_and_doubles_nothing(tmp_path):
    assert page_faults.kill_servers(tmp_path / 'f', 5, seed=0) > 5


@pytest.mark.slow
def test_a_kill_of_the_terminal_loses_and_doubles_nothing(tmp_path):
    assert page_faults.kill_terminals(tmp_path / 'f', 5, seed=0) > 5


def test_forged_and_damaged_requests_change_and_get_nothing(tmp_path):
    statuses = page_faults.fuzz(tmp_path, 500, seed=1)
    assert {400, 401, 403, 404, 405, 413, 415} <= statuses.keys()


def test_the_fuzzer_would_find_a_request_that_is_granted(tmp_path, monkeypatch):
    """Without its defects every request is one that the page might send."""
    monkeypatch.setattr(page_faults.Fuzzer, 'DEFECTS', (lambda fuzzer: None,))
    with pytest.raises(AssertionError):
        page_faults.fuzz(tmp_path, 20, seed=0)
