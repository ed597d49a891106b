"""Texts that are markup, control a terminal or a browser, or are too long: they stay text."""

import json

from run_folders import (
    write_alarm,
    write_command,
    write_events,
    write_learned,
    write_samples,
    write_settings,
)

from lm_human_preferences import storage

HOSTILE = {
    'a script': '<script>document.title = "taken"</script>',
    'a script that ends one': '</script><script>document.title = "taken"</script>',
    'the end of a style': '</style></title></textarea></svg><img src=x onerror=alert(1)>',
    'the end of an attribute': '"\' onmouseover="alert(1)" autofocus onfocus=alert(1) x="',
    'a frame': '<iframe srcdoc="<script>alert(1)</script>"></iframe>',
    'a drawing': '<svg onload=alert(1)><a xlink:href="javascript:alert(1)">x</a></svg>',
    'a comment': '<!-- --!> <![CDATA[ ]]> <?php ?> <!doctype',
    'an address': 'javascript:alert(1) http://example.org/x.png //example.org/x.js',
    'a base': '<base href="http://example.org/"><meta http-equiv=refresh content="0;url=x">',
    'entities': '&lt;b&gt; &amp; &#0; &#x202e; &notin; &nbsp',
    'a template': '{{ 7 * 7 }} {% for x in y %} {# z #} ${1} %(name)s {0.__class__} <%= 1 %>',
    'Markdown': '# head\n\n[x](http://example.org) ![y](z) `code` **bold** | table |',
    'a right-to-left override': 'user\u202egnp.exe \u2066\u2067\u2068abc',
    'no end of direction': '\u202b\u202a\u2066' * 50 + 'x',
    'right to left': 'שלום עולם مرحبا',
    'invisible characters': 'a\u200b\u200c\u200d\u2060\ufeff\u00ad\U000e0041b',
    'control characters': ''.join(map(chr, [*range(32), *range(127, 160)])),
    'an escape': '\x1b]0;taken\x07\x1b[2J\x1b[31mred',
    'NUL': 'a\0b\0',
    'line ends': 'a\r\nb\rc\u2028d\u2029e\x85f\vg\fh',
    'half a character': 'a\ud800b\udfffc',
    'no characters': '\ufffe\uffff\U0010ffff\ue000',
    'marks': 'a' + '\u0300\u0489' * 500,
    'a family': '👩\u200d👩\u200d👧\u200d👦🏳\ufe0f\u200d🌈' * 20,
    'a wide line': '𒐫﷽꧅' * 100,
    'one long word': 'w' * 100_000,
    'a megabyte of markup': '<b>' * 350_000,
    'many line ends': '\n' * 100_000,
    'nothing': '',
    'spaces': ' \t\u00a0\u3000 ',
}


def write_hostile_run(run, text):
    """A run that has `text` wherever its files hold text that others have written."""
    given = ('task__query_prefix', 'task__query_suffix', 'task__query_dataset')
    write_settings(run, 'train_policy', 'test', ranks=1, **dict.fromkeys(given, text))
    record = json.loads((run / 'run.json').read_text())
    record['train_policy']['experiment'] = text
    storage.write_json(str(run / 'run.json'), record)
    new_model = json.loads((run / 'train_reward_hparams.json').read_text())
    new_model['labels']['source'] = text
    storage.write_json(str(run / 'train_reward_hparams.json'), new_model)
    labellers = {f'{text}{number}': 1 for number in range(2)}
    write_learned(run, source=text, found=2, answers={text: 1}, labellers=labellers, digest=text)
    machine = dict.fromkeys(('processor', 'gpu', 'python', 'torch', 'launcher'), text)
    write_command(run, text, '2026-11-02T08:00:00Z', text, text, {text: 1}, **machine)
    points = {'base': {'kl': 0.0, 'reward': 0.1}, 'policy': {'kl': 1.0, 'reward': 0.5}}
    rewards = {name: {**points, text: points['base'], 'frontier': {}} for name in ('model', text)}
    evaluation = {'exact': True, 'queries': 2, 'responses': text, 'kl_coef': 1.0, 'judge': text}
    storage.write_json(str(run / 'evaluation.json'), {**evaluation, 'rewards': rewards})
    write_events(
        run / 'tb/ppo', objective__kl=1.0, **{text[:1000].encode(errors='replace').decode(): 2.0}
    )
    write_alarm(run / 'tb/ppo', 1, text)
    write_samples(run, {step: [(text, text, 0.5, 0.1), ('a', 'b', 0.1, 0)] for step in (0, 9)})
    return run
