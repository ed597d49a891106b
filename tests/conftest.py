"""Settings for all tests: few threads, nothing new by chance, GPT-2's BPE files where they are at hand."""
import os
import tempfile

os.environ.setdefault('OMP_NUM_THREADS', '1')

import hypothesis  # noqa: E402
import torch  # noqa: E402

from golden_data import bpe_directory  # noqa: E402

torch.set_num_threads(1)
hypothesis.settings.load_profile('ci')  # the same inputs each time; `--hypothesis-profile default` draws new ones

_cache = tempfile.TemporaryDirectory()  # for the language model of the reviews, which is trained once for all tests
os.environ['LMHP_CACHE'] = _cache.name

if bpe_directory() is not None:
    os.environ['LMHP_GPT2_ENCODINGS'] = str(bpe_directory())
