"""Settings for all tests: few threads, GPT-2's BPE files where they are at hand."""
import os

os.environ.setdefault('OMP_NUM_THREADS', '1')

import torch  # noqa: E402

from golden_data import bpe_directory  # noqa: E402

torch.set_num_threads(1)

if bpe_directory() is not None:
    os.environ['LMHP_GPT2_ENCODINGS'] = str(bpe_directory())
