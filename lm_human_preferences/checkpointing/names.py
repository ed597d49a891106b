"""Names of files and tensors in checkpoints; this module imports no numpy, for a fast --help.

The files are written in this order; replacing the last file commits the checkpoint:

    model.ckpt-N.resume.json           the manifest: state that TensorFlow does not keep, checksums
    model.ckpt-N.data-00000-of-00001   values of the variables, under the original's names
    model.ckpt-N.index                 their names, shapes and checksums
    checkpoint                         list of the checkpoints that are kept, the latest last

Trainers call tensors SCOPE/NAME, and Adam's moments NAME/mean and NAME/square; VariableNames
translates these names.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

LIST = 'checkpoint'
RESUME, DATA, INDEX = '.resume.json', '.data-00000-of-00001', '.index'
NAME = r'model\.ckpt(?:-\d+)?'
SUFFIX = r'\.(?:index|meta|resume\.json|data-\d{5}-of-\d{5})'
FILE = re.compile(f'({NAME})({SUFFIX})')
ANY_FILE = rf'(?:{LIST}|{NAME}{SUFFIX})'
LEFTOVER = re.compile(rf'{ANY_FILE}\.\d+\.part')  # partial file that a killed process has left
_LISTED = re.compile(
    r'^[ \t]*(model_checkpoint_path|all_model_checkpoint_paths)[ \t]*:[ \t]*'
    r'"(?:[^"\n]*[/\\])?([\w+=@-][\w.+=@ -]{0,200})"[ \t\r]*$',
    re.M | re.A,
)


def parse_checkpoint_file(text: str) -> list[str]:
    """Return the base names that a `checkpoint` file (CheckpointState) lists, the latest last."""
    latest = []
    names = []
    for field, name in _LISTED.findall(text):
        if field == 'model_checkpoint_path' and not latest:
            latest.append(name)
        if name not in names:
            names.append(name)
    return [name for name in names if name not in latest] + latest


def format_checkpoint_file(names: Sequence[str]) -> bytes:
    """Return the text of a `checkpoint` file that lists `names`, in TensorFlow's format."""
    lines = [f'model_checkpoint_path: "{names[-1]}"\n']
    for name in names:
        lines.append(f'all_model_checkpoint_paths: "{name}"\n')
    return ''.join(lines).encode()


def resumable(directory: str) -> list[str]:
    """Return the names of checkpoints with a resume.json, even damaged ones, the latest first."""
    paths = glob.glob(f'{glob.escape(directory)}/model.ckpt*{RESUME}')
    names = [os.path.basename(path).removesuffix(RESUME) for path in paths]
    return sorted(names, key=step_of, reverse=True)


def step_of(name: str) -> int:
    """Return the step in a checkpoint's name: 5 for model.ckpt-5, 0 for model.ckpt."""
    match = re.search(r'-(\d+)$', name)
    return int(match[1]) if match else 0


class VariableNames(Protocol):
    """Interface that translates a network's parameter names to names in checkpoints."""

    def name_of(self, name: str) -> str:
        """Return the checkpoint name for a parameter or moment, such as 'policy/heads.value.w'."""
        ...

    def variables(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return {checkpoint name: detached view} of `tensors` {name in this program: tensor}."""
        ...
