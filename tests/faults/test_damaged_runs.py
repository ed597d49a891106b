"""Runs that are damaged or half written: what is left of them is told, and nothing fails."""

import pytest
from damaged_runs import damaged_copies
from run_folders import EXPERIMENTS
from three_runs import make_three_runs

from lm_human_preferences.run_story import facts, model_card
from lm_human_preferences.runs import command_record

COPIES = 40  # of each run


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    return make_three_runs(tmp_path_factory.mktemp('runs'))


def card_of(run):
    command_record.read(str(run))
    return model_card.policy_card(facts.of_run(str(run)), EXPERIMENTS, 'it', has_tokeniser=True)


@pytest.mark.parametrize('name', ['amber', 'birch', 'cedar'])
def test_a_model_card_tells_what_is_left(runs, tmp_path, name):
    whole = card_of(runs[name])
    cards = {}
    for what, run in damaged_copies(runs[name], tmp_path, COPIES):
        try:
            cards[what] = card_of(run).replace(run.name, name)
        except Exception as e:
            raise AssertionError(what) from e
    assert 'belongs to no run' in cards['no settings']
    assert 'the log is not at hand' in cards['no tb/']
    assert sum(card != whole for card in cards.values()) > COPIES / 3
