"""Fine-tuning language models from human preferences: OpenAI's release of 2019 in PyTorch."""

import os

__version__ = '1.0.0'

# Batches have other numbers of rows each time, and oneDNN and PyTorch keep a compiled product for
# every number: 1,024 each, of up to a megabyte. Both read this when torch is imported.
for _name in ('ONEDNN_PRIMITIVE_CACHE_CAPACITY', 'LRU_CACHE_CAPACITY'):
    os.environ.setdefault(_name, '256')
