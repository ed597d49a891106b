"""Model card of an exported model, README.md, which names no labeller; see model_card.jinja."""

import itertools
import os
import platform
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jinja2

from lm_human_preferences import __version__, storage
from lm_human_preferences.run_story import commands, sentences
from lm_human_preferences.run_story.commands import Experiments
from lm_human_preferences.run_story.facts import RunFacts, hub_name
from lm_human_preferences.utils.terminal import printable

FILE = 'README.md'
_MARKS = re.compile(r'([\\`*_\[\]<>&|#~$])')
OTHER_TOKENS = (
    'AutoTokenizer makes other tokens of texts than the training did, as it has rules of its own'
    ' for this family. Load the tokeniser by PreTrainedTokenizerFast.from_pretrained, and give it'
    ' to the pipeline as its tokenizer.'
)


def policy_card(
    facts: RunFacts | None,
    experiments: Experiments,
    model_dir: str,
    *,
    has_tokeniser: bool,
    ends: Sequence[int] = (),
    is_adapter: bool = False,
) -> str:
    """Return the card of a policy. facts: None for a model of no run. ends: tokens, if it stops."""
    return _rendered(
        facts,
        experiments,
        has_policy=True,
        base=facts.base_model if facts is not None else hub_name(model_dir),
        tags=['rlhf', 'ppo'] if facts else [],
        has_tokeniser=has_tokeniser,
        ends=ends,
        is_adapter=is_adapter,
        repr=repr,
        members=1,
    )


def reward_card(
    facts: RunFacts | None,
    experiments: Experiments,
    constant: float,
    *,
    has_auto_tokeniser: bool = True,
    members: int = 1,
    is_adapter: bool = False,
) -> str:
    """Return the card of a reward model; constant: what the classifier's score lacks."""
    return _rendered(
        facts,
        experiments,
        has_policy=False,
        base=None if facts is None else facts.base_model,
        tags=['rlhf', 'reward-model'],
        constant=constant,
        has_other_tokens=not has_auto_tokeniser,
        OTHER_TOKENS=OTHER_TOKENS,
        members=members,
        is_adapter=is_adapter,
    )


def _rendered(facts: RunFacts | None, experiments: Experiments, **more: Any) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(os.path.dirname(__file__)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    name, command = '', None
    if facts is not None:
        name = os.path.basename(os.path.abspath(facts.directory))
        command = commands.repeating(facts, name, experiments)
    return environment.get_template('model_card.jinja').render(
        facts=facts,
        name=escaped(name),
        words=sentences,
        bullets=bullets,
        code_block=code_block,
        paragraph=paragraph,
        command=command,
        versions=_versions(),
        **more,
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
    return _MARKS.sub(r'\\\1', printable(' '.join(text.split())))


def code_block(lines: Iterable[str], language: str = '') -> str:
    """Put lines between fences that none of them closes."""
    text = '\n'.join(printable(line) for line in '\n'.join(lines).split('\n'))
    longest = max((len(run) for run in re.findall('`+', text)), default=0)
    fence = '`' * max(3, longest + 1)
    return f'{fence}{language}\n{text}\n{fence}'


def bullets(*sentences: Iterable[str]) -> str:
    """Return a list of escaped sentences; '' without any."""
    return '\n'.join(f'- {escaped(each)}' for each in itertools.chain(*sentences))


def paragraph(*sentences: Iterable[str]) -> str:
    """Return escaped sentences one after another."""
    return ' '.join(map(escaped, itertools.chain(*sentences)))
