"""Record beside a checkpoint of adapters: their base, and each network's adapter options."""

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.task_options import LoraHParams
from lm_human_preferences.runs.run_files import ADAPTER
from lm_human_preferences.storage.schema import matches_schema
from lm_human_preferences.utils.hyperparams import reading

_SCHEMA = {'base': str, 'digest': str, 'transposed': bool, 'adapters': dict}


@dataclasses.dataclass(frozen=True)
class Record:
    """Base of adapters (path or URL, digest of its parameters) and {scope: adapter options}."""

    base: str
    digest: str
    transposed: bool
    adapters: Mapping[str, LoraHParams]

    def options(self, scope: str) -> LoraHParams | None:
        """Return a network's adapter options, or None; all models of an ensemble have the same."""
        return self.adapters.get(without_number(scope))

    def write(self, directory: str) -> None:
        adapters = {scope: each.to_nested_dict() for scope, each in self.adapters.items()}
        content = {**vars(self), 'adapters': adapters}
        storage.write_json(storage.join(directory, ADAPTER), content)


def without_number(scope: str) -> str:
    """Return a network's scope without its number in an ensemble of reward models."""
    return re.sub(r'_\d+$', '', scope)


def read(directory: str | None) -> Record | None:
    """Return the record in a model's directory; None if there is no record."""
    if directory is None:
        return None
    path = storage.join(directory, ADAPTER)
    if not storage.exists(path):
        return None
    content: Any = storage.read_json(path)
    if not matches_schema(content, _SCHEMA):
        raise UserError(f'{path} is damaged: it does not describe adapters')
    adapters = {}
    for scope, options in content['adapters'].items():
        with reading(path):
            adapters[scope] = LoraHParams()
            adapters[scope].override_from_nested_dict(options)
            adapters[scope].validate()
    return Record(content['base'], content['digest'], content['transposed'], adapters)


def base_of(directory: str, record: Record) -> str:
    """Return the path of the base of the model in `directory`; UserError if it is not there."""
    if storage.is_remote(record.base) or os.path.exists(record.base):
        return record.base
    raise UserError(
        f'{directory} holds adapters of {record.base}, which is not on this machine: put the model'
        ' there'
    )
