"""Hardware of this process, for the record of a run."""

from typing import Any

import torch

from lm_human_preferences.machine import processors
from lm_human_preferences.utils.core import default_device


def hardware() -> dict[str, Any]:
    """Return processor, threads and GPU; the GPU is None if a CPU computes."""
    is_gpu = default_device().type == 'cuda'
    return {
        'processor': str(processors.this_processor()),
        'threads': torch.get_num_threads(),
        'gpu': torch.cuda.get_device_name() if is_gpu else None,
    }
