"""Model card of an exported model, README.md, which names no labeller; see model_card.jinja."""

import os
import platform
import re
from collections.abc import Iterable, Sequence
from typing import Any

from markupsafe import Markup

from lm_human_preferences import __version__, storage
from lm_human_preferences.run_story import commands, outcome, words
from lm_human_preferences.run_story.commands import Experiments
from lm_human_preferences.run_story.facts import RunFacts, hub_name
from lm_human_preferences.utils.terminal import printable

FILE = 'README.md'
_MARKS = re.compile(r'([\\`*_\[\]<>&|#~$])')
OTHER_TOKENS = (
    'AutoTokenizer makes other tokens of texts than the training did, as it has rules of its own'
    ' for this family. Load the tokenizer by PreTrainedTokenizerFast.from_pretrained, and give it'
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
        has_tokenizer=has_tokeniser,
        ends=ends,
        is_adapter=is_adapter,
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
    """Return the card of a reward model; constant: the part of the reward that its score lacks."""
    return _rendered(
        facts,
        experiments,
        has_policy=False,
        base=None if facts is None else facts.base_model,
        constant=constant,
        other_tokens='' if has_auto_tokeniser else OTHER_TOKENS,
        members=members,
        is_adapter=is_adapter,
    )


def _rendered(facts: RunFacts | None, experiments: Experiments, **more: Any) -> str:
    environment = words.environment(
        os.path.dirname(__file__), escaped, code_block=code_block, table=outcome.table
    )
    name, command = '', None
    if facts is not None:
        name = os.path.basename(os.path.abspath(facts.directory))
        command = commands.repeating(facts, name, experiments)
    return environment.get_template('model_card.jinja').render(
        run=facts, name=name, command=command, versions=_versions(), **more
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
