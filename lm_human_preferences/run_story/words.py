"""Environments of the templates of report and model card, which share the words of words.jinja."""

import functools
import os
from collections.abc import Callable
from typing import Any

import jinja2
from markupsafe import Markup

from lm_human_preferences.labels.report import wording
from lm_human_preferences.run_story.command_lines import shortened, shown
from lm_human_preferences.runs import run_lock

_HERE = os.path.dirname(__file__)


@functools.cache
def environment(
    directory: str, escape: Callable[[str], str], **filters: Callable[..., Any]
) -> jinja2.Environment:
    """Return the environment of the templates in `directory`, which may import words.jinja.

    escape: from text, all of which is untrusted, to markup in one line. filters: more of them.
    """

    def finalize(value: Any) -> Markup:
        return value if isinstance(value, Markup) else Markup(escape(str(value)))

    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader([directory, _HERE]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
        finalize=finalize,
        keep_trailing_newline=True,
    )
    found.filters |= {
        'spec': format,
        'lines': lines,
        'percent': lambda share: f'{100 * share:.1f} %',
        'repr': repr,
        'short': shortened,
        **filters,
    }
    found.globals |= {
        'label_words': wording,
        'is_held': run_lock.is_held,
        'shown': shown,
    }
    return found


def lines(text: str) -> list[str]:
    """Split what a macro of words.jinja writes into its sentences."""
    return [line.strip() for line in text.split('\n') if line.strip()]
