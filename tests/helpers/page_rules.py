"""Rules for a page of HTML that is read from the disk, by many kinds of readers."""

import base64
import hashlib
import html.parser
import itertools
import re
import unicodedata

MOST_BYTES = 2_000_000
VOID = frozenset('area base br col embed hr img input link meta source track wbr'.split())
# Attributes that name what a browser fetches, or where a link leads.
ADDRESSES = frozenset('src srcset href xlink:href action formaction poster data'.split())
REFERENCES = frozenset(
    'for aria-labelledby aria-describedby aria-controls aria-owns list headers'.split()
)
# Characters that turn the direction of text, without being letters themselves.
TURNING = frozenset('\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069')


class Element:
    def __init__(self, tag, attributes, parent):
        self.tag = tag
        self.attributes = {name: value or '' for name, value in attributes}
        self.parent = parent
        self.inside = []  # elements and strings

    @property
    def text(self):
        return ''.join(each if isinstance(each, str) else each.text for each in self.inside)

    @property
    def children(self):
        return [each for each in self.inside if isinstance(each, Element)]

    def all(self, *tags):
        for child in self.children:
            if not tags or child.tag in tags:
                yield child
            yield from child.all(*tags)

    def above(self):
        parent = self.parent
        while parent is not None:
            yield parent
            parent = parent.parent

    def __str__(self):
        return f'<{self.tag}> {" ".join(self.text.split())[:40]!r}'


class _Parser(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.root = self.open = Element('', [], None)
        self.problems = []
        self.has_doctype = False

    def handle_decl(self, decl):
        self.has_doctype |= decl.lower() == 'doctype html'

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        self.problems += [f'<{tag}> has {name} twice' for name in names if names.count(name) > 1]
        element = Element(tag, attrs, self.open)
        self.open.inside.append(element)
        if tag not in VOID:
            self.open = element

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open = self.open.parent

    def handle_endtag(self, tag):
        if tag == self.open.tag:
            self.open = self.open.parent
        else:
            self.problems.append(f'</{tag}> where <{self.open.tag}> is open')

    def handle_data(self, data):
        self.open.inside.append(data)


def parsed(text):
    return _parser_after(text).root


def _parser_after(text):
    parser = _Parser()
    parser.feed(text)
    parser.close()
    return parser


def words_of(text):
    """Return the text of a page outside of scripts and styles, with single spaces."""
    return ' '.join(_words(parsed(text)).split())


def _words(element):
    if element.tag in ('script', 'style', 'template'):
        return ' '
    parts = [each if isinstance(each, str) else _words(each) for each in element.inside]
    # A cell, an item and a paragraph are apart from the next; letters of one word are not.
    return ''.join(parts) if element.tag in INLINE else f' {"".join(parts)} '


INLINE = frozenset('a abbr b code del em i ins mark s small span strong sub sup u'.split())


def sections_of(text):
    """{heading: what is said below it} of a page; a heading has what is below its own ones, too."""
    found = {}
    for section in parsed(text).all('section', 'article'):
        heads = list(section.all(*(f'h{i}' for i in range(1, 7))))
        if heads:
            found[' '.join(heads[0].text.split())] = ' '.join(_words(section).split())
    return found


def markup_of(text):
    """{(name of an element, names of its attributes)} of a page: what texts in it cannot change."""
    return {(each.tag, *sorted(each.attributes)) for each in parsed(text).all()}


def problems(text):
    """Return the faults of a page, a line for each."""
    parser = _parser_after(text)
    root = parser.root
    found = _problems_of_document(text, parser)
    for rule in (policy, requests, headings, ids, pictures):
        found += rule(root)
    return found + characters(text)


def _problems_of_document(text, parser):
    root, found = parser.root, [*parser.problems]
    if parser.open is not root:
        found.append(f'<{parser.open.tag}> is never closed')
    if not parser.has_doctype:
        found.append('no doctype')
    size = len(text.encode())
    if size > MOST_BYTES:
        found.append(f'{size} bytes')
    if not any(each.attributes.get('lang') for each in root.all('html')):
        found.append('no language')
    if not any(each.text.strip() for each in root.all('title') if each.parent.tag == 'head'):
        found.append('no title')
    metas = {each.attributes.get('name') for each in root.all('meta')}
    found += [f'no meta {name}' for name in ('viewport', 'color-scheme') if name not in metas]
    if '<meta charset="utf-8">' not in text[:1024].lower():
        found.append('no charset in the first 1,024 bytes')
    mains = len(list(root.all('main')))
    return found if mains == 1 else [*found, f'{mains} elements <main>']


def policy(root):
    """Its policy forbids everything; scripts and styles in it are named by their digests."""
    contents = [
        each.attributes.get('content', '')
        for each in root.all('meta')
        if each.attributes.get('http-equiv', '').lower() == 'content-security-policy'
    ]
    if len(contents) != 1:
        return [f'{len(contents)} policies']
    rules = [part.split() for part in contents[0].split(';') if part.strip()]
    allowed = {name: values for name, *values in rules}
    found = []
    if allowed.get('default-src') != ["'none'"]:
        found.append("the policy lacks default-src 'none'")
    for tag in ('script', 'style'):
        values = allowed.get(f'{tag}-src', [])
        found += [f'{tag}-src {value}' for value in values if value.startswith("'unsafe")]
        for element in root.all(tag):
            digest = base64.b64encode(hashlib.sha256(element.text.encode()).digest()).decode()
            if f"'sha256-{digest}'" not in values:
                found.append(f'the policy does not allow {element}')
    styled = [each for each in root.all() if 'style' in each.attributes]
    return found + [f'{each} has a style of its own' for each in styled]


def requests(root):
    """It fetches nothing, and leads nowhere but to its own parts."""
    found = []
    for each in root.all():
        for name in ADDRESSES & each.attributes.keys():
            value = each.attributes[name].strip()
            # The second is the icon of a page that has none, so that no server is asked for it.
            if not value.startswith(('#', 'data:image/')) and value != 'data:,':
                found.append(f'<{each.tag}> has {name} {value[:60]!r}')
    for style in root.all('style'):
        found += [f'a style has {each}' for each in re.findall(r'@import|url\([^#)]*', style.text)]
    return found


def headings(root):
    """There is one <h1>, the first of them, and no level is left out on the way down."""
    levels = [int(each.tag[1]) for each in root.all(*(f'h{i}' for i in range(1, 7)))]
    found = [] if levels.count(1) == 1 and levels[0] == 1 else [f'headings {levels}']
    for before, level in itertools.pairwise(levels):
        if level > before + 1:
            found.append(f'a heading of level {level} follows one of level {before}')
    empty = [each for each in root.all(*(f'h{i}' for i in range(1, 7))) if not each.text.strip()]
    return found + [f'{each} is empty' for each in empty]


def ids(root):
    """No two elements have the same id, and each that is referred to is there."""
    all_ids = [each.attributes['id'] for each in root.all() if 'id' in each.attributes]
    found = [f'id {each!r} twice' for each in sorted(set(all_ids)) if all_ids.count(each) > 1]
    for each in root.all():
        names = []
        for attribute in REFERENCES & each.attributes.keys():
            names += each.attributes[attribute].split()
        link = each.attributes.get('href', '')
        names += [link[1:]] if link.startswith('#') and link != '#' else []
        found += [f'{each} refers to {name!r}' for name in names if name not in all_ids]
    return found


def pictures(root):
    """Each picture says what it shows, unless it is hidden from readers as an ornament."""
    found = [f'{each} has no alt' for each in root.all('img') if 'alt' not in each.attributes]
    for svg in root.all('svg'):
        if svg.attributes.get('aria-hidden') == 'true':
            continue
        titles = [each for each in svg.children if each.tag == 'title' and each.text.strip()]
        if not titles:
            found.append('an svg without a title')
        if svg.attributes.get('role') not in ('img', 'graphics-document'):
            found.append(f'an svg without a role: {titles and titles[0].text}')
    return found


def characters(text):
    """No control character is left in it, nor one that turns the direction of text."""
    bad = {
        character
        for character in set(text) - {'\n', '\t'}
        if unicodedata.category(character) in ('Cc', 'Cs') or character in TURNING
    }
    return [f'the character U+{ord(each):04X}' for each in sorted(bad)]
