"""Fine-tuning language models from human preferences: a PyTorch port of OpenAI's 2019 code."""

import os

__version__ = '1.0.0'

# oneDNN and PyTorch would each cache 1,024 compiled matrix products, of up to a megabyte each.
# oneDNN and PyTorch read the sizes of their caches from the environment when torch is imported.
for _name in ('ONEDNN_PRIMITIVE_CACHE_CAPACITY', 'LRU_CACHE_CAPACITY'):
    os.environ.setdefault(_name, '256')
