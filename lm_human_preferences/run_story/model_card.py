"""Model card of an exported model, README.md, which names no labeller; see model_card.jinja."""

import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from lm_human_preferences import __version__, storage
from lm_human_preferences.run_story import command_lines, outcome, words
from lm_human_preferences.run_story.facts import RunFacts, hub_name
from lm_human_preferences.utils.terminal import printable

FILE = 'README.md'
_MARKS = re.compile(r'([\\`*_\[\]<>&|#~$])')
JOINED = (
    'Prefix, query and suffix are one text here. The training encoded them one by one, and some'
    ' tokens differ, as where a prefix ends with a space.'
)


def card(
    facts: RunFacts | None,
    model_dir: str,
    *,
    has_policy: bool,
    has_tokenizer: bool = True,
    is_joined: bool = False,
    ends: Sequence[int] = (),
    constant: float = 0.0,
    members: int = 1,
    is_adapter: bool = False,
    head: Mapping[str, Any] | None = None,
) -> str:
    """Return the card of a policy, or of a reward model. facts: None for a model of no run.

    ends: tokens at which a policy stops. constant: part of a reward that the score lacks. members:
    reward models of its ensemble. head: of one on frozen hidden states, its 'file', its 'blocks',
    whether it is of a 'chat', the Python of the 'content' before a response, the tokens that are
    'ends' of responses, and their 'length'.
    """
    environment = words.environment(
        os.path.dirname(__file__), escaped, code_block=code_block, table=outcome.table
    )
    name, commands, base = '', [], hub_name(model_dir)
    if facts is not None:
        name = os.path.basename(os.path.abspath(facts.directory))
        lines = [each.get('command') for each in facts.recorded]
        commands = [command_lines.for_others(line) for line in lines if isinstance(line, str)]
        base = facts.base_model
    return environment.get_template('model_card.jinja').render(
        run=facts,
        name=name,
        commands=commands,
        base=base,
        has_policy=has_policy,
        has_tokenizer=has_tokenizer,
        joined=JOINED if is_joined else '',
        ends=ends,
        constant=constant,
        members=members,
        is_adapter=is_adapter,
        head=head,
        versions=_versions(),
    )


def _versions() -> str:
    import torch
    import transformers

    return (
        f'lm-human-preferences {__version__}, PyTorch {torch.__version__}, transformers'
        f' {transformers.__version__} and Python {platform.python_version()}'
    )


def write(card: str, directory: str) -> None:
    storage.write_bytes(os.path.join(directory, FILE), card.encode())


def escaped(text: str) -> str:
    """Escape Markdown in untrusted text, in one line."""
    return _MARKS.sub(r'\\\1', printable(re.sub(r'\s+', ' ', text)))


def code_block(lines: Iterable[str], language: str = '') -> Markup:
    """Put lines between fences that none of them closes."""
    text = '\n'.join(printable(line) for line in '\n'.join(lines).split('\n'))
    longest = max((len(run) for run in re.findall('`+', text)), default=0)
    fence = '`' * max(3, longest + 1)
    return Markup(f'{fence}{language}\n{text}\n{fence}')
