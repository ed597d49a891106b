"""Rules for a page of HTML that is read from the disk, and the words in it."""

import html.parser
import re
import unicodedata

MOST_BYTES = 2_000_000
HEADINGS = ('h1', 'h2', 'h3')
# Elements and attributes by which a page does something, or asks somebody.
ACTIVE = frozenset('script img iframe object embed form input base link audio video'.split())
ADDRESSES = frozenset('src srcset href xlink:href action formaction poster data'.split())
# Characters that turn the direction of all that follows.
TURNING = frozenset('\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069')


class _Parser(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.elements = []  # (name, {attribute: value})
        self.sections = {}  # {heading: text below it}
        self.open = []  # names of the elements whose text is no words of the page, and headings
        self.heading = ''
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, {name: value or '' for name, value in attrs}))
        if tag in HEADINGS:
            self.heading = ''
        if tag in ('style', 'title', *HEADINGS):
            self.open.append(tag)
        self._add(' ')

    def handle_endtag(self, tag):
        if self.open and tag == self.open[-1]:
            self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] in HEADINGS:
            self.heading += data
        elif not self.open:
            self._add(data)

    def _add(self, data):
        if not self.open:
            self.sections[self.heading] = self.sections.get(self.heading, '') + data


def sections_of(text):
    """{heading: what is said below it} of a page, with single spaces."""
    return {name: ' '.join(words.split()) for name, words in _Parser(text).sections.items()}


def words_of(text):
    return ' '.join(f'{name} {words}' for name, words in sections_of(text).items())


def markup_of(text):
    """{(name of an element, names of its attributes)} of a page: what texts in it cannot change."""
    return {(tag, *sorted(attributes)) for tag, attributes in _Parser(text).elements}


def problems(text):
    """Return the faults of a page, a line for each."""
    parser = _Parser(text)
    found = []
    if len(text.encode()) > MOST_BYTES:
        found.append('too large')
    if not text.startswith('<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'):
        found.append('another beginning')
    if '''content="default-src 'none'; style-src 'unsafe-inline'"''' not in text:
        found.append('another policy')
    for tag, attributes in parser.elements:
        if tag in ACTIVE or any(name.startswith('on') for name in attributes):
            found.append(f'<{tag}> {attributes}')
        for name in ADDRESSES & attributes.keys():
            if not attributes[name].startswith('#'):
                found.append(f'<{tag}> has {name} {attributes[name][:60]!r}')
        if tag == 'svg' and not attributes.get('aria-label'):
            found.append('a picture without a name')
    levels = [int(tag[1]) for tag, _ in parser.elements if re.fullmatch('h[1-6]', tag)]
    if levels.count(1) != 1 or levels[0] != 1:
        found.append(f'headings {levels}')
    for character in set(text) - {'\n', '\t'}:
        if unicodedata.category(character) in ('Cc', 'Cs') or character in TURNING:
            found.append(f'the character U+{ord(character):04X}')
    return found
