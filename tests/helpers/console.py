"""Parsing of printed lines: words are compared exactly, numbers to their printed digits."""

import re

import numpy as np
from compare import SUM_ATOL

NUMBER = re.compile(r'(?<![\w.])[-+]?(?:\d+(?:\.\d+)?(?:e[-+]?\d+)?|nan|inf)\b')
HERE = 'save_dir source trained_model initial_model'  # paths differ from machine to machine
MASKS = (
    (re.compile(rf'^( *(?:{HERE.replace(" ", "|")})): .+$'), r'\1: PATH'),
    (re.compile(r'^(Will save to|Param \S+ is missing from checkpoint) .*$'), r'\1 PATH'),
)
CLOCK = re.compile(r'^(k =  elapsed/(?:fps|time) , v = |\[ppo_step \d+\] step_time=)')


def masked(line):
    for pattern, replacement in MASKS:
        line = pattern.sub(replacement, line)
    return line


def assert_lines(ours, recorded, *, rtol=1e-4, atol=SUM_ATOL, ours_only=(), recorded_total=True):
    """Line by line, but for paths and speeds.

    ours_only: patterns of lines that the original did not print. recorded_total: False where the
    recorded total of a sample is not to be trusted (defect 24).
    """
    ours = [line for line in ours.splitlines() if not any(re.match(p, line) for p in ours_only)]
    recorded = recorded.splitlines()
    for number, both in enumerate(zip(map(masked, ours), map(masked, recorded), strict=False), 1):
        if recorded_total or not all(line.startswith('  total = ') for line in both):
            assert_line(*both, rtol, atol, f'line {number}: {both[0]!r}, recorded {both[1]!r}')
    assert len(ours) == len(recorded), (ours[len(recorded) :] or recorded[len(ours) :])[:5]


def assert_line(line, expected, rtol, atol, message):
    if CLOCK.match(expected):
        assert re.sub(r'[\d.]+', '#', line) == re.sub(r'[\d.]+', '#', expected), message
        return
    assert NUMBER.sub('#', line) == NUMBER.sub('#', expected), message
    for a, b in zip(NUMBER.findall(line), NUMBER.findall(expected), strict=True):
        tolerance = atol + last_digit(a, b)
        np.testing.assert_allclose(float(a), float(b), rtol, tolerance, err_msg=message)


def last_digit(*numbers):
    """Return the value of one unit of the last digit of the coarser of both."""

    def worth(number):
        mantissa, _, exponent = number.partition('e')
        return 10.0 ** (int(exponent or 0) - len(mantissa.partition('.')[2]))

    return 1.01 * max(map(worth, numbers)) if all('n' not in number for number in numbers) else 0


def printed(name, stdout):
    found = re.findall(rf'^k =  {re.escape(name)} , v =  (\S+)$', stdout, re.MULTILINE)
    return list(map(float, found))


def responses(stdout):
    return [tuple(block.strip('\n').split('\n')) for block in stdout.split('=' * 80 + '\n')[1:]]
