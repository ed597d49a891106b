"""Names of the original that this port lacks, and advice on what to use instead."""

import functools
import sys
from typing import NoReturn

# {module: {names: advice}}, where the name '' stands for the module itself
_GONE = {
    'utils.launch': {
        '': 'in launch.py, list trials in policy_experiments or reward_experiments; in a script,'
        ' call train_policy.train(hparams)'
    },
    'utils.gcs': {'': 'call storage.cached_path(url), read_text(url) or read_json(url)'},
    'utils.core': {
        'nest mpi_session mpi_session_config graph_function variables_on_gpu'
        ' find_trainable_variables': 'PyTorch has no session: functions take tensors or arrays',
        'mpi_bcast mpi_bcast_tensor_dict mpi_allreduce_sum mpi_allreduce_mean'
        ' get_local_rank_size': 'call the methods of distributed.comm.init_comm()',
        'entropy_from_logits logprobs_from_logits'
        ' sample_from_logits': 'use torch.distributions.Categorical(logits=logits)',
        'get_summary_writer record_stats': 'use utils.logging.Logger',
        'minimize': 'use training.optimizer.Adam',
    },
    'language.datasets': {'Books CnnDm Tldr Test': "call get_dataset('books'), ..."},
}


def refuse(module: str, name: str = '') -> NoReturn:
    """Raise ImportError with advice for a name that only the original has, else AttributeError."""
    for names, advice in _GONE.get(module.removeprefix('lm_human_preferences.'), {}).items():
        if name in (names.split() or ['']):
            raise ImportError(
                f'this port lacks {f"{module}.{name}".rstrip(".")} of the original: {advice}; see'
                ' docs/from-the-original.md'
            )
    raise AttributeError(f'module {module!r} has no attribute {name!r}')


def explain_missing(module: str) -> None:
    """Make a module `refuse` missing names; after a `def __getattr__`, pyright accepts any name."""
    vars(sys.modules[module])['__getattr__'] = functools.partial(refuse, module)
