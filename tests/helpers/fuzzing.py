"""Hostile input, and its limits: no hang, no huge allocation, no write elsewhere, no execution."""

import contextlib
import json
import os
import resource
import signal
import sys

PATIENCE = 60  # seconds for one input
ALLOWANCE = 1 << 30  # bytes of address space beyond what the process has; an input has a few KiB
FORBIDDEN = set(
    'pickle.find_class os.system os.exec os.fork os.posix_spawn os.spawn subprocess.Popen'
    ' socket.connect ctypes.dlopen os.symlink os.link os.chmod shutil.rmtree'.split()
)
CHANGING = {'os.remove', 'os.rename', 'os.rmdir', 'os.mkdir', 'os.truncate'}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_place = None  # the only folder that may be written to while inputs are judged, else None
_refused = []  # what was tried meanwhile all the same

NASTY = [None, True, False, 0, -1, 1, 27, 1 << 31, 1 << 63, -(1 << 64), 10**30]
NASTY += [1.5, -0.0, 1e308, float('nan'), float('inf')]
NASTY += ['', 'a', '\0', '\n', '\ud800', 'on', 'off', 'None', '../../x', '/etc/passwd', '/dev/zero']
NASTY += ['x' * 1000, [], {}, [[]], [1, [2, [3]]], {'a': {'b': {}}}, {'': None}, [0] * 300]
NASTY += [{'__class__': 'os.system'}]
SNIPPETS = [b'', b'\0', b'\xff' * 9, b'{', b'}', b'[' * 3000, b'"', b'\\u', b'\\ud800', b'9' * 5000]
SNIPPETS += [b'-', b'1e999', b'NaN', b'\n', b'\r\n', b'\xef\xbb\xbf', b'\xed\xa0\x80']
SNIPPETS += [b'\x80\x80\x80\x80\x01', b'null', b'../', b'"model"', b' ', b':']


# PyTorch's build for CUDA loads the driver's library, of this fixed name, to count GPUs.
COUNTING_GPUS = ('ctypes.dlopen', 'libnvidia-ml.so.1')


def _judge(event, arguments):
    """An audit hook, which Python cannot take back: it acts while inputs are judged only."""
    if _place is None or (event, *arguments) == COUNTING_GPUS:
        return
    wrote = event in CHANGING or (
        event == 'open' and isinstance(arguments[2], int) and arguments[2] & WRITING
    )
    if event in FORBIDDEN or (
        wrote and not os.path.realpath(os.fsdecode(arguments[0])).startswith(_place)
    ):
        _refused.append(f'{event} {arguments!r}')
        raise AssertionError(_refused[-1])


sys.addaudithook(_judge)


@contextlib.contextmanager
def little_memory():
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open('/proc/self/statm', encoding='ascii') as f:
        used = int(f.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ALLOWANCE, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _give_up(number, frame):
    raise AssertionError(f'still at it after {PATIENCE} s')


def confined(place, call, *arguments):
    """Return `call()` within PATIENCE; it executes nothing and writes nothing but in `place`."""
    global _place
    writes_no_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    handler = signal.signal(signal.SIGALRM, _give_up)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    _refused.clear()
    _place = os.path.realpath(place)
    try:
        return call(*arguments)
    finally:
        _place = None
        sys.dont_write_bytecode = writes_no_bytecode
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        # The call may have taken the refusal for a fault of its input.
        assert not _refused, _refused


def damaged(random, data):
    data = bytearray(data)
    for _ in range(random.choice([1, 1, 2, 5])):
        start = random.randrange(len(data) + 1)
        end = min(len(data), start + random.choice([0, 1, 1, 4, 40, len(data)]))
        kind = random.randrange(4)
        if kind == 0 and start < len(data):
            data[start] ^= 1 << random.randrange(8)
        elif kind == 1:
            data[start:end] = random.choice(SNIPPETS)
        elif kind == 2:
            data[start:end] = random.randbytes(end - start)
        else:
            source = random.randrange(len(data) + 1)
            data[start:start] = data[source : source + random.choice([1, 8, 100])]
    return bytes(data[: 1 << 20])


def changed(random, value):
    if not isinstance(value, (dict, list)) or not value or random.random() < 0.1:
        return random.choice(NASTY)
    value = value.copy()
    key = random.choice(list(value) if isinstance(value, dict) else range(len(value)))
    kind = random.randrange(10)
    if kind == 0:
        del value[key]
    elif kind == 1 and isinstance(value, dict):
        value[random.choice(['', 'x', 'a.b', '\n', key + ' '])] = value.pop(key)
    elif kind == 2 and isinstance(value, list):
        value.insert(key, random.choice(NASTY))
    else:
        value[key] = changed(random, value[key])
    return value


def json_bytes(random, value):
    for _ in range(random.choice([0, 1, 1, 2])):
        value = changed(random, value)
    text = json.dumps(value).encode()
    return damaged(random, text) if random.random() < 0.4 else text
