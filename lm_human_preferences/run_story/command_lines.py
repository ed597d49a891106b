"""Recorded command lines, as others may read them: without names, folders and keys."""

import os
import re
import shlex

_LONGEST = 20_000  # characters of a command line
NAMES = 'NAMES'  # stands for the names of labellers, which are nobody's business
_OF_NAMES = ('labels.without', 'serve.labellers')  # options whose values are such names end so


def is_of_names(option: str) -> bool:
    """Return whether the value of an option is names of labellers."""
    return option.endswith(_OF_NAMES)


def for_others(line: str) -> str:
    """Return a command line with the last parts of local paths, and no name of a labeller."""
    line = without_names(line)
    words = []
    for word in shlex.split(line):
        option, equals, value = word.partition('=')
        if option.startswith('--') and equals:
            words.append(f'{option}={shortened(value)}')
        else:
            words.append(shortened(word))
    return shlex.join(words)


def without_names(line: str) -> str:
    """Replace the names of labellers in a command line; all of one that cannot be read."""
    words = _words_of(line)
    if words is None:
        return NAMES
    for place, word in enumerate(words):
        option, equals, _ = word.partition('=')
        if not is_of_names(option):
            continue
        if equals:
            words[place] = f'{option}={NAMES}'
        elif place + 1 < len(words):
            words[place + 1] = NAMES
    return shlex.join(words)


def _words_of(line: str) -> list[str] | None:
    """Split a command line into words; None if it is malformed, or too long to be read fast."""
    if len(line) > _LONGEST:
        return None
    try:
        return shlex.split(line)
    except ValueError:
        return None


def shortened(path: str) -> str:
    """Return the last part of an absolute local path, or a URL without its key."""
    if os.path.isabs(path):
        return os.path.basename(path.rstrip('/')) or path
    if re.match('https?://', path):
        return re.sub('//[^/]*@', '//', re.split('[?#]', path)[0])
    return path


def shown(key: str, value: object) -> str:
    """Return a value for others to read, as it is typed."""
    if value is not None and is_of_names(key):
        return NAMES
    return shortened(value) if isinstance(value, str) else str(value)
