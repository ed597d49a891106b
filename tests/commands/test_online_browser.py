"""A whole run that collects labels, answered in a real browser."""

import pytest
from browser import Window, needs_chromium
from interrupted import assert_same
from online_runs import alike, meanwhile, train
from page_client import id_of_token

from lm_human_preferences.labels.answers import shown_order
from lm_human_preferences.labels.folder import LabelFolder
from lm_human_preferences.labels.page.key import folder_key
from lm_human_preferences.labels.simulated_labeller import small_tokens
from lm_human_preferences.language import encodings
from lm_human_preferences.online import collection

pytestmark = [pytest.mark.slow, needs_chromium]
# Three steps, before each of which somebody has to answer; the reward model is trained twice.
SETTINGS = {
    'ppo__total_episodes': 192,
    'rewards__online__labels': 20,
    'rewards__online__initial': 8,
    'rewards__online__retrainings': 1,
    'rewards__online__ahead': 0,
    'rewards__online__repeated': 0.0,
    'rewards__online__validation': 0.0,
    'rewards__online__error': 0.0,
}
ASKED = 19  # before the last step: 8 + 12 (1 - 1/9), rounded up
PEOPLE = {
    'rewards__online__source': 'people',
    'rewards__online__patience': 0.02,
    'run__serve': 'on',
    'run__serve__labellers': 'anna',
    'run__serve__port': 0,
}


@pytest.fixture
def window():
    window = Window()
    yield window
    window.driver.quit()


def answer(window, folder):
    """Choose what small_tokens would, by the texts that are shown."""
    window.ready()
    encoder = encodings.Test.get_encoder()
    folder.refresh()
    id = id_of_token(folder, window.script('queue[0].id'))
    order = shown_order('anna', id, 4, folder_key(folder.path).order)
    shown = [encoder.encode(text) for text in window.samples()]
    tokens = {f'sample{index}': ids for index, ids in sorted(zip(order, shown, strict=True))}
    (rewards,) = small_tokens([tokens])
    window.answer(str(order.index(rewards.index(max(rewards))) + 1))


def test_a_script_in_a_browser_gives_the_run_of_the_simulated_labeller(
    tmp_path, window, monkeypatch
):
    monkeypatch.setattr('lm_human_preferences.hparams.online_options.ASKED_AT_ONCE', 1)
    monkeypatch.setattr(collection, 'POLL_SECONDS', 0.05)
    train(tmp_path / 'simulated', **SETTINGS)
    links = []
    monkeypatch.setattr(collection, 'announce', lambda *lines: links.extend(lines))

    def answer_all(directory, done):
        while not links and not done.wait(0.05):
            pass
        window.begin(links[0].partition(': ')[2])
        folder = LabelFolder(str(directory / 'labels'))
        for _ in range(ASKED):
            answer(window, folder)

    with meanwhile(answer_all, tmp_path / 'run'):
        said = train(tmp_path / 'run', **{**SETTINGS, **PEOPLE})
    assert 'reward model 2 of 2, before step ' in said
    assert_same(alike(tmp_path / 'run'), alike(tmp_path / 'simulated'))
