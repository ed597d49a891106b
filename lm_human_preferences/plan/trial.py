"""Trial of a plan without a network: what a training would read first, where it is here."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from lm_human_preferences import lm_tasks, storage
from lm_human_preferences.datasets import jsonl, registry
from lm_human_preferences.distributed.comm import LocalComm
from lm_human_preferences.errors import UserError
from lm_human_preferences.external_rewards.texts import TextScorer, joined
from lm_human_preferences.labels import label_files, simulated
from lm_human_preferences.language import datasets
from lm_human_preferences.language.trained_models import GPT2
from lm_human_preferences.plan import checks
from lm_human_preferences.synthetic import known_reward
from lm_human_preferences.training import memory
from lm_human_preferences.utils.core import default_device

if TYPE_CHECKING:
    from lm_human_preferences.language.encodings import Encoder, Encoding
    from lm_human_preferences.language.network import Network
    from lm_human_preferences.plan.making import Plan
    from lm_human_preferences.plan.phases import TrainReward
    from lm_human_preferences.training.model_sizes import Sizes


@dataclasses.dataclass
class Trial:
    """Findings. unchecked: what is not on this machine. encoding: None where its model is not."""

    plan: Plan
    ranks: int
    unchecked: list[str] = dataclasses.field(default_factory=list)
    query_notes: list[str] = dataclasses.field(default_factory=list)
    estimates: list[memory.MemoryEstimate] = dataclasses.field(default_factory=list)
    encoding: Encoding | None = None
    width: int | None = None

    @property
    def has_queries(self) -> bool:
        """True if queries of the task are here, and were read."""
        return bool(self.query_notes)

    def make(self) -> None:
        """Raise UserError if the training could not begin: the model, texts, labels, reward."""
        self._check_model()
        self._check_dataset()
        if self.plan.policy is not None and self.plan.policy.retraining is not None:
            self._check_online()
        elif self.plan.rewards:
            self._check_labels(self.plan.rewards[0])
        else:
            self._check_reward()

    def _check_model(self) -> None:
        """Check what needs no download; find the initial model's encoding if it is here."""
        name = self.plan.settings.task.policy.initial_model
        known = lm_tasks.known_model(name)
        if known is not None:
            sizes, self.encoding = known
            self._check_sizes(sizes, self.encoding, GPT2(sizes).create)
            return
        path = storage.model_path(name) or name
        if not storage.is_model_here(path):
            self.unchecked.append(f'--task.policy.initial_model {name}')
            return
        initial_model = lm_tasks.initial_model(name)
        self.encoding = initial_model.encoding
        self._check_sizes(initial_model.sizes(), self.encoding, initial_model.create)
        if initial_model.architecture.is_probed and storage.is_hub(path):
            self.unchecked.append(f'the weights of --task.policy.initial_model {name}')
        else:
            initial_model.check_runs()

    def _check_sizes(
        self, sizes: Sizes, encoding: Encoding, create: Callable[[Iterable[str]], Network]
    ) -> None:
        """Check that the task suits the initial model; estimate the memory of its networks."""
        if encoding.is_here:
            lm_tasks.check_task(self.plan.settings.task, encoding, sizes)
        else:
            self.unchecked.append(f'the encoding {encoding.name}, which is needed to check lengths')
        self.width = sizes.n_embd
        sizes = checks.sizes_of(self.plan, sizes, create)
        for estimate in self.plan.memory(sizes, self.ranks):
            estimate.check_batches(self.free_memory())
            self.estimates.append(estimate)

    def _encoder(self) -> Encoder | None:
        """Return the encoder of the initial model, if it is here."""
        if self.encoding is None or not self.encoding.is_here:
            return None
        return self.encoding.get_encoder()

    def free_memory(self) -> int:
        """Return the bytes that each rank may take."""
        return memory.free_bytes(default_device(), self.ranks)

    def _check_dataset(self) -> None:
        task = self.plan.settings.task
        name = task.query_dataset
        is_elsewhere = storage.is_remote(name) and not storage.is_here(name)
        if registry.info(name).downloaded or is_elsewhere:
            self.unchecked.append(f'--task.query_dataset {name}')
            return
        datasets.get_dataset(name)
        encoder = self._encoder()
        if encoder is None:
            return
        lm_tasks.make_query_sampler(task, encoder=encoder, batch_size=1)()
        self.query_notes = checks.check_queries(self.plan, encoder)
        if self.plan.evaluation is not None:
            self.query_notes += lm_tasks.query_notes(task, encoder, 'test')

    def _check_online(self) -> None:
        """Check the collecting of labels, which needs no source but may take a source's queries."""
        assert self.plan.policy is not None and self.plan.policy.retraining is not None
        online = self.plan.policy.settings.rewards.online
        if online is not None and online.source == 'mock' and self.encoding is not None:
            known_reward.check_encoding(self.encoding)
        if registry.info(self.plan.settings.task.query_dataset).labels_stand_in:
            self.unchecked += _elsewhere(self.plan.policy.retraining)

    def _check_labels(self, phase: TrainReward) -> None:
        settings, elsewhere = phase.settings, _elsewhere(phase)
        self.unchecked += elsewhere
        if settings.labels.are_sampled:
            if self.encoding is not None:
                known_reward.check_encoding(self.encoding)
            simulated.check_num_train(settings)
            return
        encoder = self._encoder()
        if encoder is not None and self.encoding is not None and not elsewhere:
            labels = label_files.load_labels(settings, self.encoding).tensors
            phase.split(labels, encoder)

    def _check_reward(self) -> None:
        assert self.plan.policy is not None
        source = self.plan.policy.source
        elsewhere = source.elsewhere()
        self.unchecked += elsewhere
        if not elsewhere:
            source.pinned(LocalComm()).check_scoring(self)

    def ask(self, scorer: TextScorer) -> None:
        """Ask a reward about the first two queries of each file here, as their responses."""
        for where, queries in self._first_queries():
            texts = [joined(query.text, query.text, query.columns) for query in queries]
            try:
                scorer.score(texts)
            except UserError as e:
                if where is None:
                    raise
                raise UserError(f'{where}, on which --run.evaluate needs the reward: {e}') from e

    def _first_queries(self) -> Iterator[tuple[str | None, Iterable[jsonl.Query]]]:
        """Yield (file of the test part or None, two queries)."""
        name = self.plan.settings.task.query_dataset
        if f'--task.query_dataset {name}' in self.unchecked:
            yield None, [jsonl.Query('', 'A query.', {})] * 2
        elif name in registry.DATASETS:
            texts = itertools.islice(registry.info(name).load().generator('train'), 2)
            yield None, [jsonl.Query('', str(text), {}) for text in texts]
        else:
            yield None, jsonl.read_queries(name)[:2]
            file = jsonl.file_of_test_part(name)
            if file is not None and self.plan.evaluation is not None:
                yield file, jsonl.read_queries(file)[:2]


def _elsewhere(phase: TrainReward) -> list[str]:
    labels = phase.settings.labels
    return [
        labels.setting(name)
        for name, path in labels.sources().items()
        if storage.is_remote(path) and not storage.is_here(path)
    ]
