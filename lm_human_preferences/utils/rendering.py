"""Rendering of chat templates by transformers, in a subprocess with limited time and memory.

A template is foreign code. The sandbox of transformers limits what it can reach, but neither its
time nor its memory.
"""

import contextlib
import functools
import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

SECONDS = 2.0  # limit of processor time for rendering one dialogue
MEGABYTES = 512  # limit of memory for rendering dialogues
# The signal SIGVTALRM ends the subprocess after SECONDS, whatever the template does.
# Python's option -P prevents imports from the current folder.
_PROGRAM = """
import json, resource, signal, sys
from transformers.utils.chat_template_utils import render_jinja_template
seconds, megabytes = map(float, sys.argv[1:])
with open('/proc/self/statm') as file:
    pages = int(file.read().split()[0])
limit = pages * resource.getpagesize() + int(megabytes * 2**20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
for line in sys.stdin:
    dialogue, settings = json.loads(line)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        found = {'text': render_jinja_template([dialogue], **settings)[0][0]}
    except BaseException as e:
        found = {'error': f'{type(e).__name__}: {e}' if isinstance(e, MemoryError) else str(e)}
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    print(json.dumps(found), flush=True)
"""


class TemplateError(Exception):
    """Error: a template fails, or takes too much time or memory."""


_lock = threading.Lock()


@functools.cache
def _renderer() -> subprocess.Popen[str]:
    """Start the subprocess, which reads requests and writes answers, each as one line of JSON."""
    return subprocess.Popen(
        [sys.executable, '-P', '-c', _PROGRAM, str(SECONDS), str(MEGABYTES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # the subprocess gets no Ctrl-C; it ends when stdin closes
    )


def _answer(request: str) -> dict[str, str]:
    """Return {'text': ...} or {'error': ...} for a request, the JSON of [dialogue, settings]."""
    with _lock:
        process = _renderer()
        assert process.stdin is not None and process.stdout is not None
        answer = ''
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(f'{request}\n')
            process.stdin.flush()
            answer = process.stdout.readline()
        if answer:
            return json.loads(answer)
        process.kill()
        process.communicate()
        _renderer.cache_clear()
    return {'error': f'it takes more than {SECONDS:g} s, or ends the process that renders it'}


def render(tokeniser: Any, dialogue: Sequence[Mapping[str, str]], **settings: Any) -> str:
    """Return a dialogue as text, as `tokeniser.apply_chat_template(dialogue, **settings)` does.

    TemplateError if the template fails, or takes too much time or memory.
    """
    template = {'chat_template': tokeniser.get_chat_template(), **tokeniser.special_tokens_map}
    found = _answer(json.dumps([list(dialogue), {**template, **settings}], default=str))
    if 'error' in found:
        error_of_the_chat_template = found['error']
        raise TemplateError(error_of_the_chat_template)
    return found['text']
