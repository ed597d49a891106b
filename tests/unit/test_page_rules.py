"""The rules by which pages are judged: each finds what it is about, and nothing in a good page."""

import base64
import hashlib

import pytest
from page_rules import colours, contrast, markup_of, parsed, problems, words_of

STYLE = """
:root { --ink: #222; --paper: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #eee; --paper: #111 } p { margin: 0 } }
p { color: var(--ink) }
"""


def digest(text):
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


GOOD = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src \
'sha256-{digest(STYLE)}'">
<title>A page</title>
<style>{STYLE}</style>
</head>
<body><main id="top">
<h1>One</h1><h2>Two</h2><h3>Three</h3><h2>Two</h2>
<a href="#top">up</a>
<svg role="img" aria-labelledby="name"><title id="name">A curve</title><path d="M0 0"/></svg>
<svg aria-hidden="true"><path d="M0 0"/></svg>
<table><caption>Numbers</caption><tr><th scope="col">KL</th></tr><tr><td>1.5</td></tr></table>
<label>Step <input type="range"></label>
<button>Next</button>
<p>Plain, <b>b</b>old<br>and &lt;i&gt; שלום</p>
</main></body>
</html>
"""


def test_a_good_page_has_no_problems():
    assert problems(GOOD) == []


@pytest.mark.parametrize(
    'before, after, found',
    [
        ('<!doctype html>', '', 'no doctype'),
        (' lang="en"', '', 'no language'),
        ('<title>A page</title>', '<title> </title>', 'no title'),
        ('<meta charset="utf-8">', '', 'no charset in the first 1,024 bytes'),
        ('name="color-scheme"', 'name="x"', 'no meta color-scheme'),
        ('<p>', '<main></main><p>', '2 elements <main>'),
        ('</b>', '', '</p> where <b> is open'),
        ('</html>', '', '<html> is never closed'),
        ('<p>', '<p id="a" id="b">', '<p> has id twice'),
        ('<p>', '<p>' + 'x' * 2_000_000, ' bytes'),
        ("default-src 'none'; ", '', "the policy lacks default-src 'none'"),
        ('http-equiv', 'name', '0 policies'),
        ('margin: 0', 'margin: 1', 'the policy does not allow <style>'),
        ("style-src '", "style-src 'unsafe-inline' '", "style-src 'unsafe-inline'"),
        ('<p>', '<script>1</script><p>', "the policy does not allow <script> '1'"),
        ('<p>', '<p style="top: 0">', 'has a style of its own'),
        ('<p>', '<img src="https://x/y.png" alt="">', "<img> has src 'https://x/y.png'"),
        ('<p>', '<img src="y.png" alt="">', "<img> has src 'y.png'"),
        ('href="#top"', 'href=" javascript:x"', "<a> has href 'javascript:x'"),
        ('margin: 0', 'background: url(x.png)', 'a style has url(x.png'),
        ('<h3>', '<h4>', 'a heading of level 4 follows one of level 2'),
        ('<h1>One</h1>', '', 'headings [2, 3, 2]'),
        ('<h2>Two</h2>', '<h2> </h2>', 'is empty'),
        ('<p>', '<p id="top">', "id 'top' twice"),
        ('href="#top"', 'href="#end"', "refers to 'end'"),
        ('aria-labelledby="name"', 'aria-labelledby="name x"', "refers to 'x'"),
        ('<title id="name">A curve</title>', '<g id="name"/>', 'an svg without a title'),
        ('role="img"', '', 'an svg without a role: A curve'),
        ('<p>', '<img>', 'has no alt'),
        ('<caption>Numbers</caption>', '', 'has no caption'),
        (' scope="col"', '', 'has no scope'),
        ('<th scope="col">KL</th>', '<td>KL</td>', 'has no heads'),
        ('<label>Step <input type="range"></label>', '<input>', '<input> has no label'),
        ('>Next<', '><', '<button> has no text'),
        ('<p>', '<p onclick="x()">', '<p> has onclick'),
        ('and', 'a\u202end', 'the character U+202E'),
        ('and', 'a\x1bnd', 'the character U+001B'),
    ],
)
def test_a_problem_is_found(before, after, found):
    assert before in GOOD
    assert any(found in each for each in problems(GOOD.replace(before, after)))


def test_the_words_of_a_page_are_apart_where_they_look_apart():
    words = words_of(GOOD)
    assert 'Plain, bold and <i> שלום' in words and 'Three Two up' in words and 'KL 1.5' in words
    assert '--ink' not in words


def test_texts_that_are_escaped_change_no_markup():
    assert markup_of(GOOD.replace('Plain', '&lt;x y=1&gt;')) == markup_of(GOOD)
    assert ('x', 'y') in markup_of(GOOD.replace('and', '<x y=1></x>'))


def test_colours_of_a_style_and_their_contrast():
    (style,) = parsed(GOOD).all('style')
    assert colours(style.text) == {'--ink': '#222', '--paper': '#fff'}
    assert colours(style.text, 'dark') == {'--ink': '#eee', '--paper': '#111'}
    assert contrast('#000', '#ffffff') == pytest.approx(21)
    assert contrast('#777', '#fff') == contrast('#fff', '#777777') == pytest.approx(4.478, abs=1e-3)
    assert contrast('#123', '#123') == 1
