"""Twenty questions about three runs that a reader would ask: the page alone answers them."""

import re

import pytest
from page_rules import sections_of
from run_folders import EXPERIMENTS
from three_runs import make_three_runs

from lm_human_preferences.report_page import render

HAPPENED, EVALUATION, SAMPLES = 'What happened', 'How far from the best possible', 'Samples'
CURVES, LABELS, ORIGIN = 'Curves', 'Labels', 'Where it comes from'
UNKNOWN = 'What is not known'
QUESTIONS = [
    # amber was interrupted, killed, and then came close to the best possible.
    ('amber', 'What was trained?', HAPPENED, 'policy .* tiny language model of made-up film rev'),
    ('amber', 'How far did it get, and how sure is that?', HAPPENED, r'90\.7 ± 2\.2 % of the gain'),
    ('amber', 'What was its KL in the end?', HAPPENED, r'KL of 1\.97 ± 0\.02 nats'),
    ('amber', 'Did it train in one go?', HAPPENED, r'resumed before steps 9, 13'),
    ('amber', 'Which training ended how?', ORIGIN, 'interrupted .* was killed.* finished'),
    ('amber', 'Which settings were not the usual?', ORIGIN, r'ppo\.lr 0\.002 0\.003'),
    ('amber', 'Was its code that of a commit?', ORIGIN, '3ce96054.* that were not committed'),
    ('amber', 'What do I type to repeat it?', ORIGIN, r'mock_sentiment \S+ --mpi 2 .*lr 0\.002'),
    ('amber', 'What did it write before and after?', SAMPLES, 'weak and bad .* moving and superb'),
    # birch learned from two people, and an alarm stopped it.
    ('birch', 'Did it come to its end?', HAPPENED, 'after 768 of 6,400 episodes'),
    ('birch', 'What went wrong?', HAPPENED, 'alarm at step 12 .the policy .* 1 command that'),
    ('birch', 'Who gave the labels, how many?', LABELS, '8 labels .* people gave .* 2 labellers'),
    ('birch', 'Do they agree?', LABELS, r'75\.0 % of 4 pairs .* Chance is 25\.0 %'),
    ('birch', 'Who took how long?', LABELS, r'hedda .* 2\.0 .* ivo .* 5\.0'),
    ('birch', 'Can its reward model be trusted?', LABELS, r'62\.5 % of the labels .* held out'),
    ('birch', 'How far from the best is it?', UNKNOWN, 'How close the policy comes to the best'),
    # cedar games its reward.
    ('cedar', 'Does it do well?', HAPPENED, r'99\.0 % of the gain .* known reward.* -7\.8 %'),
    (
        'cedar',
        'How good was it before?',
        EVALUATION,
        r'known reward.* base 0\.000 -0\.197',
    ),
    (
        'cedar',
        'What does it write for its score?',
        SAMPLES,
        r'unlikely .*vast score 3\.94, KL 9\.71',
    ),
    ('cedar', 'Why?', LABELS, r'64 labels .* 30\.0 % are answers at random.* 56\.2 %'),
]


@pytest.fixture(scope='module')
def pages(tmp_path_factory):
    runs = make_three_runs(tmp_path_factory.mktemp('runs'))
    return {name: sections_of(render.page([str(run)], EXPERIMENTS)) for name, run in runs.items()}


def test_twenty_questions_are_answered(pages):
    unanswered = [
        (run, question)
        for run, question, section, answer in QUESTIONS
        if not re.search(answer, pages[run][section])
    ]
    assert unanswered == [] and len(QUESTIONS) == 20
