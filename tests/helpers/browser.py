"""Debian's chromium with a page for labellers, driven by selenium."""

import functools
import json
import shutil
import time

import pytest

webdriver = pytest.importorskip('selenium.webdriver', reason='selenium is not installed')
CHROMIUM, DRIVER = shutil.which('chromium'), shutil.which('chromedriver')
FLAGS = '--headless --no-sandbox --disable-gpu --disable-background-networking'
needs_chromium = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason='this machine has no chromium with a chromedriver'
)


class Window:
    def __init__(self):
        options = webdriver.ChromeOptions()
        for flag in FLAGS.split():
            options.add_argument(flag)
        options.binary_location = CHROMIUM
        options.set_capability('goog:loggingPrefs', {'browser': 'ALL', 'performance': 'ALL'})
        service = webdriver.ChromeService(DRIVER)  # named, or selenium would download one
        self.driver = webdriver.Chrome(options, service)

    def script(self, code, *arguments):
        return self.driver.execute_script(f'return {code}', *arguments)

    def open(self, link):
        self.driver.get('about:blank')  # a new fragment alone is not a new page
        self.driver.get(link)

    def begin(self, link):
        self.open(link)
        self.until("document.querySelector('dialog[open]')")
        self.press('h')
        self.ready()

    def until(self, code, seconds=20):
        end = time.monotonic() + seconds
        while not (found := self.script(code)):
            assert time.monotonic() < end, (code, self.script('document.body.innerText'))
            time.sleep(0.01)
        return found

    def ready(self):
        """Return the text of a question that takes answers, which it does at once."""
        self.until('question && !pending && (shownAt -= GUARD)')
        return self.text('#query .text')

    def hurry(self):
        """Have a page wait a tenth of the time."""
        self.driver.execute_script(
            'const wait = setTimeout; window.setTimeout = (call, ms) => wait(call, ms / 10)'
        )

    def answered(self, count):
        """Wait until the page says '3 of 9', or another such `count`, and asks the next."""
        self.until(f"document.querySelector('#count b')?.textContent === '{count}'")
        self.ready()

    def press(self, *keys):
        for key in keys:
            webdriver.ActionChains(self.driver).send_keys(key).perform()

    def button(self, number):
        return self.driver.find_element('css selector', f'button[data-number="{number}"]')

    def tap(self, element):
        box = self.script('arguments[0].getBoundingClientRect()', element)
        where = {'x': box['x'] + 5, 'y': box['y'] + 5}
        touch = functools.partial(self.driver.execute_cdp_cmd, 'Input.dispatchTouchEvent')
        touch({'type': 'touchStart', 'touchPoints': [where]})
        touch({'type': 'touchEnd', 'touchPoints': []})

    def answer(self, *keys):
        for key in keys:
            self.ready()
            shown = self.script('shownAt')
            self.press(key)
            self.until(f'shownAt !== {shown} || (!question && !pending)')

    def text(self, selector):
        return self.script('document.querySelector(arguments[0]).textContent', selector)

    def samples(self):
        return self.script(
            "[...document.querySelectorAll('.scroll .text')].map(e => e.textContent)"
        )

    def emulate(self, width=1000, height=800, scheme='light'):
        self.driver.execute_cdp_cmd(
            'Emulation.setDeviceMetricsOverride',
            {'width': width, 'height': height, 'deviceScaleFactor': 1, 'mobile': width < 500},
        )
        features = [{'name': 'prefers-color-scheme', 'value': scheme}]
        self.driver.execute_cdp_cmd('Emulation.setEmulatedMedia', {'features': features})

    def console(self):
        return [entry['message'] for entry in self.driver.get_log('browser')]

    def requests(self):
        messages = [
            json.loads(entry['message'])['message'] for entry in self.driver.get_log('performance')
        ]
        return [
            message['params']['request']['url']
            for message in messages
            if message['method'] == 'Network.requestWillBeSent'
        ]
