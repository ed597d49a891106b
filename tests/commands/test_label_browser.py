"""The page for labellers in a real browser: Debian's chromium, driven by selenium."""

import contextlib
import http.server
import json
import re
import signal
import threading

import example_label_type
import pytest
from browser import Window, needs_chromium
from label_folders import make_folder
from label_page import ByteEncoder, answers_of, served, web_options, write_texts, written
from launched import eventually
from page_client import Server
from page_looks import sticking_out, weak_texts
from page_proxy import free_port, needs_nginx, proxy

from lm_human_preferences.labels.answers import REASONS
from lm_human_preferences.labels.page.server import LabelServer
from lm_human_preferences.utils.terminal import INVISIBLE

pytestmark = needs_chromium
BACKSPACE, TAB, ENTER, ESCAPE = '\ue003', '\ue004', '\ue007', '\ue00c'
TEXTS = [(f'question {i}', *(f'{i}, sample {j}' for j in range(4))) for i in range(9)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / 'f'


@pytest.fixture(scope='module')
def browser():
    window = Window()
    yield window
    window.driver.quit()


@pytest.fixture
def window(browser):
    browser.driver.delete_all_cookies()
    browser.emulate()
    browser.console(), browser.requests()
    yield browser
    assert browser.console() == []
    hosts = {re.match(r'\w+:(//[^/:]*)?', url)[0] for url in browser.requests()}
    assert hosts <= {'http://127.0.0.1', 'data:', 'about:'}, hosts
    browser.driver.get('about:blank')


@contextlib.contextmanager
def shown(window, path, texts=TEXTS, label_type='best_of_4', **options):
    write_texts(path, texts, label_type)
    with served(path, 'anna', **options) as (page, _):
        window.begin(page.links['anna'])
        yield page
        window.driver.get('about:blank')


def test_keys_record_the_sample_that_is_shown_there(window, path):
    with shown(window, path):
        seen = []
        for key in '1234':
            seen.append((window.ready(), window.samples()[int(key) - 1]))
            window.answer(key)
        assert window.text('#count') == '4 of 9'
        assert re.fullmatch(r'\d+ a minute', window.text('#rate'))
    answers = answers_of(path, 'anna')
    assert [answer.order.index(answer.value) for answer in answers] == [0, 1, 2, 3]
    for (query, sample), answer in zip(seen, answers, strict=True):
        number = query.split()[1]
        assert sample == f'{number}, sample {answer.value}'
        assert 0.2 < answer.seconds < 60
    assert len({answer.order for answer in answers}) > 1


@needs_nginx
def test_the_page_works_at_a_path_of_a_proxy(window, path, tmp_path):
    write_texts(path, TEXTS)
    port = free_port()
    with proxy(tmp_path, port) as public:
        url = f'http://127.0.0.1:{public}/preferences/'
        with LabelServer(str(path), ['anna'], web_options(port=port, public_url=url)) as page:
            page.service.encoder = ByteEncoder()
            window.begin(page.links['anna'])
            window.answer('1')
            window.driver.refresh()
            window.answer('2')
            assert (window.driver.current_url, window.text('#count')) == (url, '2 of 9')
            assert 'proofpreferences/' in window.script('Object.keys(localStorage)')
            window.driver.get('about:blank')
    assert len(written(path)) == 2


def test_a_double_press_is_one_answer(window, path):
    with shown(window, path):
        window.ready()
        window.press('2', '2', '2')
        window.answered('1 of 9')
        held = "new KeyboardEvent('keydown', {key: '1', repeat: true, bubbles: true})"
        window.script(f'document.dispatchEvent({held})')
        window.double_click('[data-choice="3"]')
        window.answered('2 of 9')
    assert [answer.order.index(answer.value) for answer in answers_of(path, 'anna')] == [1, 2]


def test_a_click_on_a_response_chooses_it_and_one_that_selects_text_does_not(window, path):
    with shown(window, path):

        def sample(number):
            return window.driver.find_elements('css selector', '.sample .text')[number - 1]

        window.ready()
        sample(2).click()
        window.answered('1 of 9')
        window.drag_over(sample(1))
        assert 'sample' in window.script('getSelection().toString()')
        sample(3).click()  # takes the selection away
        assert window.script('getSelection().isCollapsed && isReady()')
        window.script('arguments[0].click()', sample(3))  # as screen readers do
        assert window.script('isReady()')
        sample(4).click()
        window.answered('2 of 9')
        window.tap(sample(3))
        window.answered('3 of 9')
    assert [answer.order.index(answer.value) for answer in answers_of(path, 'anna')] == [1, 3, 2]


def test_undo_then_another_answer_which_may_stay(window, path):
    with shown(window, path):
        first = window.ready()
        window.answer('1')
        second = window.ready()
        window.answer(BACKSPACE)
        assert window.ready() == first and 'taken back' in window.text('#status')
        window.answer('4')
        assert window.ready() == second
        assert window.text('#count') == '1 of 9'
        # a training has learned from it
        (path / 'used.jsonl').write_text(json.dumps({'answers': {'anna': 3}}) + '\n')
        window.press(BACKSPACE)
        window.until("document.getElementById('saving').textContent.includes('That answer stays')")
        assert window.ready() == second
        assert ['409' in line for line in window.console()] == [True]
    assert [answer.order.index(answer.value) for answer in answers_of(path, 'anna')] == [3]
    assert len(written(path)) == 3


def test_skip_with_a_reason_and_help(window, path):
    with shown(window, path):
        window.ready()
        window.press('s', ESCAPE)
        window.until("!document.querySelector('dialog[open]')")
        window.press('s')
        window.until("document.getElementById('skip-dialog').open")
        window.press('2')
        window.answered('1 of 9')
        assert window.text('#instructions') == 'Choose.'  # before any help is asked for
        window.press('h')
        assert window.until("document.getElementById('help-dialog').open")
        window.press('1')  # is not an answer while help is shown
        window.driver.find_element('id', 'use-keys').click()
        window.press(ESCAPE, '1')
        assert window.text('#count') == '1 of 9'
    assert [answer.reason for answer in answers_of(path, 'anna')] == [REASONS[1]]


def test_no_preference_has_a_key_and_a_button(window, path):
    make_folder(path, 0, task={'ties': True})
    with shown(window, path):
        window.ready()
        window.press('0')
        window.answered('1 of 9')
        window.driver.find_element('id', 'tie').click()
        window.answered('2 of 9')
        window.answer('2')
        window.press('h')
        assert window.until("document.getElementById('help-dialog').open")
        assert 'no preference, and go on' in window.text('#keys')
    tie, clicked, choice = answers_of(path, 'anna')
    assert (tie.value, clicked.value, choice.order.index(choice.value)) == ('tie', 'tie', 1)


def test_numbers_on_a_scale(window, path):
    with shown(window, path, [row[:2] for row in TEXTS], 'scalar_rating'):
        window.answer('1', '5', '9')
        assert len(window.samples()) == 1
        window.ready()
        window.driver.find_element('css selector', '[data-choice="7"]').click()
        window.answered('4 of 9')
    assert [answer.value for answer in answers_of(path, 'anna')] == [1, 5, 9, 7]


def test_several_keys_or_clicks_make_a_ranking(window, path, monkeypatch):
    example_label_type.register(monkeypatch)
    with shown(window, path, TEXTS, 'ranking_of_4'):
        window.ready()
        window.press('3', '3', '1', BACKSPACE, '4')
        buttons = "[...document.querySelectorAll('.choose')].map(button => button.textContent)"
        assert window.script(buttons) == ['1', '2', '#1', '#2']
        assert window.text('#status') == 'So far: 3, 4'
        window.press('1', '2')
        window.answered('1 of 9')
        samples = window.driver.find_elements('css selector', '.sample .text')
        for number in (2, 1, 4):
            samples[number - 1].click()
        window.driver.find_element('id', 'undo').click()
        samples[2].click()
        samples[3].click()
        window.answered('2 of 9')
        window.press('1', BACKSPACE, BACKSPACE)  # the second takes the answer back
        window.answered('1 of 9')
    (answer,) = answers_of(path, 'anna')
    assert example_label_type.places(answer) == [3, 4, 1, 2]
    assert len(written(path)) == 3


def test_a_server_that_is_killed_before_it_replies(window, path):
    """The choice is kept, also when the page is loaded anew meanwhile, and recorded once."""
    make_folder(path, 5)
    first = Server(path, ['anna'])
    try:
        window.begin(first.links['anna'])
        window.answer('1')
        window.ready()
        first.process.send_signal(signal.SIGSTOP)
        window.press('3')
        window.until('pending')
    finally:
        first.end(signal.SIGKILL)
    window.until("!document.getElementById('alert').hidden")
    assert 'Your choice is kept' in window.text('#alert')
    window.press('4')  # changes nothing
    second = Server(path, ['anna'], first.port)
    try:
        window.answered('2 of 5')
        assert window.script("document.getElementById('alert').hidden")
        second.process.send_signal(signal.SIGSTOP)
        window.press('2')
        window.until('pending')
    finally:
        second.end(signal.SIGKILL)
    third = Server(path, ['anna'], first.port)
    try:
        window.driver.refresh()
        window.answered('3 of 5')
        window.driver.get('about:blank')
    finally:
        third.end()
    assert [answer.order.index(answer.value) for answer in answers_of(path, 'anna')] == [0, 2, 1]
    assert len(written(path)) == 3
    assert [line for line in window.console() if 'net::ERR' not in line] == []


class Thief(http.server.BaseHTTPRequestHandler):
    """Another program at the port of a page. heard: (headers, body) of what it was sent."""

    heard = []

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get('Content-Length', 0))).decode()
        self.heard.append((dict(self.headers), body))
        reply = json.dumps({'code': '0' * 64, 'ended': False, 'questions': [], 'lost': []}).encode()
        self.send_response(200)
        self.send_header('Content-Length', str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_):
        pass


def test_another_program_at_the_port_is_not_told_how_to_answer(window, path):
    """It gets neither cookie nor proof nor questions from a page that tries again."""
    with shown(window, path) as page:
        question = window.ready()
        page.close()
        window.until("main.dataset.state === 'ended'")
        thief = http.server.ThreadingHTTPServer(('127.0.0.1', page.port), Thief)
        thread = threading.Thread(target=thief.serve_forever)
        thread.start()
        eventually(lambda: len(Thief.heard) > 2, 60)
        thief.shutdown()
        thief.server_close()
        thread.join()
        for headers, body in Thief.heard:
            assert not {'Cookie', 'Labelling-Proof'} & headers.keys()
            assert set(json.loads(body)) == {'labeller', 'nonce'}
        assert len({json.loads(body)['nonce'] for _, body in Thief.heard}) == len(Thief.heard)
        with served(path, 'anna', port=page.port):
            assert window.ready() == question
            window.answer('1')
            window.driver.get('about:blank')
    assert [line for line in window.console() if 'net::ERR' not in line] == []
    assert len(written(path)) == 1


def test_without_a_link_nothing_is_shown(window, tmp_path):
    with shown(window, tmp_path / 'f') as page:
        window.open(f'{page.url}/#wrong')
        window.until("main.dataset.state === 'locked'")
        assert 'This link is not valid' in window.text('#locked')
        window.driver.delete_all_cookies()
        window.open(f'{page.url}/')
        window.until("main.dataset.state === 'locked'")
        assert 'Open the link that you were given' in window.text('#locked')
        assert window.script("document.getElementById('header').hidden")
        assert all('401' in line for line in window.console())


def test_an_empty_queue_says_where_the_rest_is_and_is_filled_without_a_reload(window, path):
    write_texts(path, TEXTS[:4])
    with served(path, 'anna', 'bob') as (page, _, bob):
        now = [0.0]
        page.service.assignments.clock = lambda: now[0]
        of_bob = bob.questions(count=3)
        window.begin(page.links['anna'])
        window.answer('1')
        window.until("main.dataset.state === 'resting'")
        assert window.script('document.activeElement.textContent').startswith('Nothing is left')
        assert '3 questions are with others' in window.text('#rest')
        assert window.text('#count') == '1 of 4'
        write_texts(path, [(f'new {i}', 'a', 'b', 'c', 'd') for i in range(2)])
        window.until("main.dataset.state === 'asking' && queue.length === 2")
        assert window.ready().startswith('new ') and window.text('#count') == '1 of 6'
        now[0] = 601.0  # anna has gone
        of_bob += bob.questions(held=[question['id'] for question in of_bob], count=2)
        assert [bob.answer(question['id'])[0] for question in of_bob] == [200] * 5
        window.answer('1')  # she is back: the other question is no longer hers
        window.until("main.dataset.state === 'resting'")
        assert window.text('#count') == '2 of 6, 4 by others'
        assert window.text('#elsewhere') == ''
        window.driver.get('about:blank')


def test_another_labeller_in_the_same_browser_does_not_answer_for_the_first(window, path):
    write_texts(path, TEXTS)
    with served(path, 'anna', 'bob') as (page, _, _):
        window.begin(page.links['anna'])
        window.script(
            "fetch('session', {method: 'POST', headers: {'Content-Type':"
            " 'application/json'}, body: JSON.stringify({token: arguments[0]})})"
            ".then(reply => reply.json()).then(({proof}) => localStorage.setItem('proof', proof))",
            page.links['bob'].partition('#')[2],
        )
        window.ready()
        window.press('1')
        window.until("main.dataset.state === 'locked'")
        assert 'open as bob' in window.text('#locked')
        assert written(path) == []
        window.open(page.links['anna'])  # what she had chosen is sent now
        window.answered('1 of 9')
        assert all('401' in line for line in window.console())
        window.driver.get('about:blank')
    assert [answer.labeller for answer in answers_of(path, 'anna')] == ['anna']


HOSTILE = [
    '<script>document.title = "owned"</script><img src=x onerror="document.title=\'owned\'">',
    'a\u202eb\u2066c\u200bd\x1b[31me\x00f\u2028g\ufeffh',
    'one\ntwo\n\nfour',
    'word ' * 500,
]


def test_hostile_and_long_texts_appear_as_text(window, tmp_path):
    with shown(window, tmp_path / 'f', [('</p><b>bold</b>&amp;', *HOSTILE)]):
        assert window.ready() == '</p><b>bold</b>&amp;'
        script, marks, lines, words = sorted(
            window.samples(), key=lambda text: '<aow'.index(text[0])
        )
        assert script == HOSTILE[0] and window.driver.title == 'Labelling'
        codes = [f'U+{code}' for code in '202E 2066 200B 001B 0000 2028 FEFF'.split()]
        assert marks == 'a{}b{}c{}d{}[31me{}f{}g{}h'.format(*codes)
        assert lines == 'one⏎\ntwo⏎\n⏎\nfour' and words == HOSTILE[3]
        assert not window.script("document.querySelector('main img, main b, main script')")
        # what the terminal shows as codes, too
        codes = [code for code in range(0x110000) if INVISIBLE.match(chr(code))]
        unseen = 'arguments[0].filter(code => UNSEEN.test(String.fromCodePoint(code)))'
        assert window.script(unseen, codes) == codes and len(codes) == 267
        for selector in ('.query .text', '.sample .text'):
            style = f"getComputedStyle(document.querySelector('{selector}'))"
            assert window.script(f'{style}.whiteSpace').startswith('pre-wrap')
            assert window.script(f'{style}.unicodeBidi') == 'isolate'


@pytest.mark.parametrize('scheme', ['light', 'dark'])
def test_light_and_dark_can_be_read_on_320_pixels(window, tmp_path, scheme):
    long = [('many words ' * 90 + '\n' + 'x' * 300, *HOSTILE)] * 1 + TEXTS
    with shown(window, tmp_path / 'f', long):
        window.answer('1')
        for width in (320, 1400):
            window.emulate(width, 700, scheme)
            window.ready()
            assert sticking_out(window) == []
            boxes = "[...document.querySelectorAll('button')].filter(b => b.checkVisibility())"
            sizes = window.script(
                f'{boxes}.map(b => b.getBoundingClientRect()).map('
                'r => [r.width, r.height, r.right])'
            )
            assert all(w >= 24 and h >= 24 and right <= width for w, h, right in sizes)
            assert weak_texts(window) == []
        for dialog in 'sh':
            window.press(dialog)
            window.until("document.querySelector('dialog[open]')")
            assert weak_texts(window) == []
            window.press(ESCAPE)


@pytest.mark.slow
def test_keyboard_alone_and_a_screen_reader(window, path):
    with shown(window, path):
        window.ready()
        tree = window.driver.execute_cdp_cmd('Accessibility.getFullAXTree', {})['nodes']
        found = {
            (node['role']['value'], node.get('name', {}).get('value', ''))
            for node in tree
            if not node.get('ignored')
        }
        assert {
            ('heading', 'Question 1 of 9'),
            ('heading', 'Response 4'),
            ('region', 'Text'),
            ('list', ''),
            ('progressbar', 'Answered'),
            ('group', 'Tools'),
            ('banner', ''),
            ('main', ''),
            *(('button', f'Choose response {i}') for i in (1, 2, 3, 4)),
        } <= found
        assert {name.split()[0] for role, name in found if role == 'button'} == {
            'Choose',
            'Undo',
            'Skip',
            'Help',
        }
        # focus is on the new question; Tab goes through the choices, Enter chooses
        assert window.script('document.activeElement.id') == 'heading'
        window.press(TAB, TAB, TAB)
        assert window.script('document.activeElement.dataset.choice') == '3'
        outline = window.script('getComputedStyle(document.activeElement).outlineStyle')
        assert outline == 'solid'
        window.press(ENTER)
        window.answered('1 of 9')
        assert window.script('document.activeElement.id') == 'heading'
        window.ready()
        window.press('s')
        assert window.until('document.activeElement.textContent').endswith(REASONS[0])
        window.press(TAB, ENTER)
        window.answered('2 of 9')
    one, two = answers_of(path, 'anna')
    assert (one.order.index(one.value), two.reason) == (2, REASONS[1])
