"""The page for labellers in a real browser: Debian's chromium, driven by selenium."""

import contextlib
import re
import signal

import pytest
from browser import Window, needs_chromium, webdriver
from label_folders import make_folder
from label_page import answers_of, places, served, write_texts, written
from page_client import Server
from page_looks import focused, sticking_out, unnamed, unreachable, weak_texts

from lm_human_preferences.labels.answers import REASONS
from lm_human_preferences.utils.streams import INVISIBLE

pytestmark = needs_chromium
BACKSPACE, TAB, ENTER, ESCAPE = '\ue003', '\ue004', '\ue007', '\ue00c'
TEXTS = [(f'question {i}', *(f'{i}, sample {j}' for j in range(4))) for i in range(12)]
NAMES = "[...document.querySelectorAll('#buttons button')].map(b => b.ariaLabel)"


@pytest.fixture(scope='module')
def browser():
    window = Window()
    yield window
    window.driver.quit()


@pytest.fixture
def window(browser):
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


def test_keys_clicks_and_taps_record_the_sample_that_is_shown_there(window, path):
    with shown(window, path):
        seen = []
        for key in '1234':
            seen.append((window.ready(), window.samples()[int(key) - 1]))
            window.answer(key)
        assert window.text('#count') == '4 of 12 answered'
        assert window.text('#status') == 'Saved: Response 4. Undo takes it back.'
        window.ready()
        window.driver.find_element('css selector', '.scroll').click()  # texts choose nothing
        window.tap(window.driver.find_element('css selector', '.scroll'))
        assert window.script('isReady()')
        window.button(2).click()
        window.answered('5 of 12')
        window.tap(window.button(3))
        window.answered('6 of 12')
        # a double press is one answer
        window.press('2', '2', '2')
        window.until('isReady()')
        held = "new KeyboardEvent('keydown', {key: '1', repeat: true, bubbles: true})"
        window.script(f'document.dispatchEvent({held})')
        webdriver.ActionChains(window.driver).double_click(window.button(3)).perform()
        window.answered('8 of 12')
        # keyboards of other scripts
        event = "new KeyboardEvent('keydown', {key: arguments[0], code: arguments[1]})"
        key = f'document.dispatchEvent({event})'
        window.script(key, '۲', 'Digit2')
        window.answered('9 of 12')
        window.script(key, 'س', 'KeyS')
        window.until("document.getElementById('skip-dialog').open")
    assert places(path) == [0, 1, 2, 3, 1, 2, 1, 2, 1]
    answers = answers_of(path, 'anna')
    for (query, sample), answer in zip(seen, answers, strict=False):
        number = query.split()[1]
        assert sample == f'{number}, sample {answer.value}'
        assert 0 < answer.seconds < 60
    assert len({answer.order for answer in answers}) > 1


def test_undo_skip_and_help(window, path):
    with shown(window, path):
        first = window.ready()
        window.answer('1')
        second = window.ready()
        window.answer(BACKSPACE)
        assert window.ready() == first and 'taken back' in window.text('#status')
        window.answer('4')
        assert window.ready() == second
        assert window.text('#count b') == '1 of 12'
        window.press('s', ESCAPE)
        window.until("!document.querySelector('dialog[open]')")
        window.press('s')
        window.until("document.getElementById('skip-dialog').open")
        window.press('2')
        window.answered('2 of 12')
        window.press('h')
        assert window.until("document.getElementById('help-dialog').open")
        assert window.text('#instructions') == 'Choose.'
        window.press('1')  # is not an answer while help is shown
        assert window.text('#count b') == '2 of 12'
    answer, skipped = answers_of(path, 'anna')
    assert (answer.order.index(answer.value), skipped.reason) == (3, REASONS[1])


KEPT = """
const body = {answer: uuid(), question: question.id, seconds: 1, choice: [1]};
sessionStorage.setItem(PENDING, JSON.stringify({path: 'answer', body, labeller: 'bob'}));
"""


def test_two_tabs_are_two_people_whatever_is_loaded_again(window, path):
    write_texts(path, TEXTS)
    with served(path, 'anna', 'bob') as (page, _, _):
        window.begin(page.links['anna'])
        anna = window.driver.current_window_handle
        window.driver.switch_to.new_window('tab')
        window.begin(page.links['bob'])
        window.answer('2')
        bob = window.driver.current_window_handle
        for tab, name in ((anna, 'anna'), (bob, 'bob')):
            window.driver.switch_to.window(tab)
            window.driver.refresh()
            window.until("document.getElementById('who').textContent")
            assert window.text('#who') == name
            assert window.driver.current_url == f'{page.url}/'  # the key is out of sight
            window.until('question')
            window.press(ESCAPE)
            window.answer('1')
            window.driver.get('about:blank')
            window.driver.back()
            window.ready()
        window.driver.close()
        window.driver.switch_to.window(anna)
        window.driver.switch_to.new_window('tab')
        for link, why in (('', 'this tab does not have it'), ('#wrong', 'This link is not valid')):
            window.open(f'{page.url}/{link}')
            window.until("!document.getElementById('panel').hidden && hasEnded")
            assert why in window.text('#panel') and window.samples() == []
        assert all('401' in line for line in window.console())
        window.driver.close()
        window.driver.switch_to.window(anna)
        window.driver.execute_script(KEPT)  # as after a link of bob's, opened in this tab
        window.driver.refresh()
        window.ready()
        window.driver.get('about:blank')
    assert places(path, 'anna') == [0] and places(path, 'bob') == [1, 0]


def test_no_preference_and_both_bad_have_keys_and_buttons(window, path):
    make_folder(path, 0, task={'label_type': 'best_of_2', 'ties': True}, samples=2)
    with shown(window, path, [row[:3] for row in TEXTS], 'best_of_2'):
        names = ['Response 1 is better', 'Equally good', 'Both bad', 'Response 2 is better']
        assert window.script(NAMES) == names
        window.answer('0', '9')
        window.ready()
        window.button(0).click()
        window.answered('3 of 12')
        window.button(9).click()
        window.answered('4 of 12')
    answers = answers_of(path, 'anna')
    assert all(answer.value == 'tie' for answer in answers)
    assert [answer.is_bad for answer in answers] == [False, True, False, True]


def test_the_scale_is_that_of_the_folder(window, path):
    make_folder(path, 0, task={'label_type': 'scalar_rating', 'scale': [-1, 3]}, samples=1)
    with shown(window, path, [row[:2] for row in TEXTS], 'scalar_rating'):
        assert window.script(NAMES) == ['-1, worst', '0', '1', '2', '3, best']
        assert len(window.samples()) == 1
        window.ready()
        window.press('-', '1')  # has no key
        assert window.script('isReady()') and '-1' not in window.text('#keys')
        window.button(-1).click()
        window.answered('1 of 12')
    assert [answer.value for answer in answers_of(path, 'anna')] == [-1]
    make_folder(
        path.with_name('g'), 0, task={'label_type': 'scalar_rating', 'scale': [0, 4]}, samples=1
    )
    with shown(window, path.with_name('g'), [row[:2] for row in TEXTS], 'scalar_rating'):
        window.answer('0', '4')
        window.ready()
        window.press('5')  # is none of them
        assert window.script('isReady()')
    assert [answer.value for answer in answers_of(path.with_name('g'), 'anna')] == [0, 4]


def test_a_server_that_does_not_answer_and_one_that_is_killed(window, path):
    """The choice is kept, also when the page is loaded anew meanwhile, and recorded once."""
    make_folder(path, 5)
    first = Server(path, ['anna'])
    window.begin(first.links['anna'])
    window.ready()
    first.process.send_signal(signal.SIGSTOP)
    window.press('1', '4')  # the second changes nothing
    window.until('pending && document.querySelector(".pick:disabled")')
    assert window.text('#status') == 'Saving: Response 1…'
    first.process.send_signal(signal.SIGCONT)
    window.driver.refresh()
    window.answered('1 of 5')
    window.hurry()
    first.process.send_signal(signal.SIGSTOP)
    window.press('3')
    window.until('pending')
    first.end(signal.SIGKILL)
    window.until("document.getElementById('alert').textContent.startsWith('Not saved yet')")
    assert len(window.samples()) == 4  # can be read
    second = Server(path, ['anna'], first.port)
    window.until("document.getElementById('panel').textContent.includes('needs your link')")
    assert 'Your last choice (Response 3) may not be saved' in window.text('#panel')
    window.driver.get(second.links['anna'])
    window.answered('1 of 5')
    assert window.text('#status').startswith('Not saved: Response 3. That question')
    window.answer('2')
    second.end()
    window.until("document.getElementById('panel').textContent.includes('has ended')")
    window.driver.get('about:blank')
    assert places(path) == [0, 1] and len(written(path)) == 2
    assert all(re.search('net::ERR|401|409', line) for line in window.console())


def test_an_empty_queue_says_where_the_rest_is_and_is_filled_without_a_reload(window, path):
    write_texts(path, TEXTS[:2])
    with served(path, 'anna', 'bob') as (page, _, bob):
        assert bob.question()
        window.begin(page.links['anna'])
        window.hurry()
        window.answer('1')
        window.until("document.getElementById('panel').textContent.startsWith('Nothing is left')")
        assert 'Others have 1 on the screen' in window.text('#panel')
        window.press(BACKSPACE)
        window.answered('0 of 2')
        window.answer('2')
        bob.answer(bob.question()['id'])
        write_texts(path, [('new', 'a', 'b', 'c', 'd')])
        assert window.ready() == 'new'
        window.driver.get('about:blank')
    assert places(path) == [1]


HOSTILE = [
    '<script>document.title = "owned"</script><img src=x onerror="document.title=\'owned\'">',
    'a\u202eb\u2066c\u200bd\x1b[31me\x00f\u2028g\ufeffh\u200d',
    'one\r\ntwo\n\n four',
    'word ' * 500,
]
FOREIGN = [
    'می‌خواهم سه میزبان',
    'क्‍ष और श्री‌मान',
    '👩‍💻 👨‍👩‍👧‍👦 ❤️ 1️⃣ 👍🏽 🏴󠁧󠁢󠁥󠁮󠁧󠁿 🏳️‍🌈',
    'Stra\u00adße',
    '葛\U000e0100飾区',
]


def test_texts_appear_as_texts(window, path):
    """Foreign ones as they are, hostile ones without effect, code as code, ends marked."""

    def parts(text):
        nodes = '[...textOf(arguments[0]).childNodes].filter(each => each.textContent)'
        return window.script(f'{nodes}.map(each => [each.className ?? "", each.textContent])', text)

    with shown(window, path, [('</p><b>bold</b>&amp;', *HOSTILE)]):
        assert window.ready() == '</p><b>bold</b>&amp;'
        script, marks, lines, words = sorted(
            window.samples(), key=lambda text: '<aow'.index(text[0])
        )
        assert script == HOSTILE[0] and 'answered' in window.driver.title
        codes = [f'U+{code}' for code in '202E 2066 200B 001B 0000 2028 FEFF 200D'.split()]
        assert marks == 'a{}b{}c{}d{}[31me{}f{}g{}h{}'.format(*codes)
        assert lines == HOSTILE[2] and words == f'{HOSTILE[3].rstrip()}1 blank'
        assert not window.script("document.querySelector('main img, main b, main script')")
        # what the terminal shows as codes, too
        codes = [code for code in range(0x110000) if INVISIBLE.match(chr(code))]
        unseen = 'arguments[0].filter(code => marked(String.fromCodePoint(code)).length > 1)'
        assert window.script(unseen, codes) == codes and len(codes) == 267
        for text in FOREIGN:  # joiners of scripts and emoji are left alone
            assert parts(text) == [['', text]]
        for hidden in ('a\u200db', 'a\u00adb', '👩\u200d', '❤\ufe0f\ufe0f'):
            assert any('U+' in part for _, part in parts(hidden))
        fenced = '```python\n\tx = 1\n```\n'
        assert parts(f'So:\n{fenced}and') == [['', 'So:\n'], ['mono', fenced], ['', 'and']]
        indented = 'def f():\n    x = 1\n    return x'
        assert parts(indented) == [['mono', indented]]
        assert parts('- a\n  - b\n  - c')[0][0] == ''
        assert parts('') == [['mark', 'empty']]
        assert parts('a \nb \n') == [['', 'a \nb'], ['mark', '1 blank'], ['mark', '1 line end']]
        style = "getComputedStyle(document.querySelector('.scroll .text'))"
        assert window.script(f'{style}.whiteSpace').startswith('pre-wrap')
        assert window.script(f'{style}.unicodeBidi') == 'plaintext'


def test_light_and_dark_can_be_read_on_320_pixels(window, path):
    long = [('many words ' * 90 + '\n' + 'x' * 300, *HOSTILE), *TEXTS]
    with shown(window, path, long):
        window.answer('1')
        for width, scheme in ((320, 'light'), (320, 'dark'), (1400, 'dark'), (1400, 'light')):
            window.emulate(width, 700, scheme)
            window.ready()
            assert sticking_out(window) == unreachable(window) == weak_texts(window) == []
            boxes = "[...document.querySelectorAll('button')].filter(b => b.checkVisibility())"
            sizes = window.script(
                f'{boxes}.map(b => b.getBoundingClientRect()).map('
                'r => [r.width, r.height, r.right, r.bottom])'
            )
            # the buttons are in sight, however long the texts are
            assert all(w >= 24 and h >= 24 and right <= width for w, h, right, _ in sizes)
            assert all(bottom <= 700 for *_, bottom in sizes)
        window.emulate(740, 360)  # a phone held sideways
        window.ready()
        cut = "[...document.querySelectorAll('section')].map(s => s.scrollHeight - s.clientHeight)"
        assert max(window.script(cut)) <= 0
        assert window.script("document.querySelector('footer').clientHeight") < 360 / 3
        for dialog in 'sh':
            window.press(dialog)
            window.until("document.querySelector('dialog[open]')")
            assert weak_texts(window) == []
            window.emulate(1400, 700, 'dark')
            assert weak_texts(window) == []
            window.press(ESCAPE)


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
            ('heading', '0 of 12 answered'),
            ('heading', 'Response 4'),
            ('region', 'Text'),
            ('progressbar', 'Answered'),
            ('main', ''),
            ('button', 'Response 1'),
        } <= found
        assert unnamed(window) == []
        # focus is on the new question; Tab goes through texts and choices, Enter chooses
        assert window.script('document.activeElement.id') == 'heading'
        names, hidden = focused(window)
        assert hidden == [] and len(names) == 5 + 4, names
        window.driver.refresh()
        window.until("document.querySelector('dialog[open]')")
        window.press(ESCAPE)
        window.ready()
        window.press(*[TAB] * 8)
        assert window.script('document.activeElement.dataset.number') == '3'
        window.press(ENTER)
        window.answered('1 of 12')
        window.press('s')
        assert window.until('document.activeElement.textContent').endswith(REASONS[0])
        window.press(TAB, ENTER)
        window.answered('2 of 12')
    one, two = answers_of(path, 'anna')
    assert (one.order.index(one.value), two.reason) == (2, REASONS[1])
