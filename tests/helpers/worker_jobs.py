"""Quick jobs for the workers of `figures`, without torch."""

import os
import sys
import time
from pathlib import Path

from lm_human_preferences.errors import UserError


def write_number(path, number, folder):
    """Leave a mark for each call, and fail while `folder` holds broken-NUMBER."""
    Path(folder, f'{number}-{time.time_ns()}').touch()
    print('number', number, 'torch' in sys.modules, os.environ['OMP_NUM_THREADS'])
    if Path(folder, f'broken-{number}').exists():
        raise UserError(f'{number} is broken')
    Path(path).write_text(str(number))
