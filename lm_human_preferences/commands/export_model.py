"""Export of a trained model as a Hugging Face directory (safetensors), for other tools."""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence

import torch
from safetensors import SafetensorError

from lm_human_preferences import lm_tasks, rewards, storage
from lm_human_preferences.commands.sampler import warnings_only
from lm_human_preferences.errors import UserError
from lm_human_preferences.language import trained_models
from lm_human_preferences.language.adapters import peft_files, record
from lm_human_preferences.language.encodings import Encoder
from lm_human_preferences.language.exported import checks, classifier, tokeniser
from lm_human_preferences.language.networks import model_kinds
from lm_human_preferences.language.networks.model_kinds import is_classifier, is_head, is_model
from lm_human_preferences.language.networks.network import Network
from lm_human_preferences.language.texts import tokenisers
from lm_human_preferences.machine import precision
from lm_human_preferences.report import page
from lm_human_preferences.report.run import Run, read_run
from lm_human_preferences.reward_sources.frozen_head.head import load, pooled, task_of
from lm_human_preferences.reward_sources.frozen_head.reward import checked
from lm_human_preferences.reward_sources.loading import saved_model
from lm_human_preferences.runs import run_files

CardWriter = Callable[..., None]  # function that writes the model card into a directory
RESPONSES = 'texts'  # subfolder for a tokeniser that encodes responses as the head's training did


def export(model_dir: str, output_dir: str, form: str = 'model') -> None:
    """Save a model and its card for transformers; if `form` is 'adapter', save both for PEFT."""
    import transformers

    # Progress bars would clutter redirected output.
    transformers.utils.logging.disable_progress_bar()
    with storage.new_directory(output_dir, SafetensorError):
        if is_classifier(model_dir):
            raise UserError(
                f'{model_dir} is already a sequence classifier for transformers: copy it as it is'
            )
        run, is_adapter = read_run(model_dir), form == 'adapter'
        write_card = functools.partial(
            page.write_card, run=run, model_dir=model_dir, is_adapter=is_adapter
        )
        reward_model = _reward_model_in(model_dir)
        if reward_model is None:
            _export_policy(model_dir, output_dir, run, write_card, is_adapter=is_adapter)
        elif is_adapter:
            raise UserError(f'--form adapter: {model_dir} is a reward model; leave --form out')
        elif is_head(str(reward_model.savedir)):
            _export_head(str(reward_model.savedir), output_dir, write_card)
        else:
            _export_reward_model(reward_model, output_dir, write_card)
    print(f'Saved {model_dir} to {output_dir}, with a model card, {page.CARD}')


def _export_policy(
    model_dir: str, output_dir: str, run: Run | None, write_card: CardWriter, is_adapter: bool
) -> None:
    policy = trained_models.TrainedModel(model_dir)
    encoder = policy.encoding.get_encoder()
    task = run and run.settings and run.settings.task
    context = _context(task, encoder)
    tokens = context[: policy.sizes().n_ctx]
    if is_adapter:
        base = peft_files.write(output_dir, policy, run_files.POLICY.network, _base)
        logits = _logits(policy.build(scope='model'), tokens) if _is_here(base) else None
    else:
        network = policy.build(scope='model')
        logits = _logits(network, tokens)
        policy.as_transformers(network).save_pretrained(output_dir)
        del network  # frees memory: the check below loads the network again
    policy.encoding.write_tokeniser(output_dir)
    ends: list[int] = []
    if task is not None:
        ends = _ends(task, encoder)
        _write_generation_config(task.policy.temperature, ends, output_dir)
    is_bare = not _has_tokeniser(output_dir)
    if not is_bare and task is not None:
        _check_context(output_dir, task, context)
    if logits is not None:
        checks.check_logits(output_dir, tokens, logits)
    write_card(output_dir, has_policy=True, is_bare=is_bare, ends=ends)


@torch.no_grad()
def _logits(network: Network, tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits (n_vocab,) of the token that follows `tokens`."""
    with precision.plain():
        return network.logits(network.hidden(torch.tensor([tokens])))[0, -1]


def _context(task: lm_tasks.TaskHParams | None, encoder: Encoder) -> list[int]:
    """Return the unpadded token ids that a policy reads for the query checks.QUERY."""
    query = encoder.encode(checks.QUERY)
    if task is None:
        return query
    task = dataclasses.replace(task, query_length=len(query))
    (context,) = lm_tasks.query_formatter(task, encoder)(torch.tensor([query])).tolist()
    return encoder.without_padding(context)


def _check_context(directory: str, task: lm_tasks.TaskHParams, context: list[int]) -> None:
    """Raise UserError unless transformers encodes the query checks.QUERY as `context`.

    Print only a note if tokens differ because prefix and suffix were encoded separately.
    """
    content = f'{task.query_prefix}{checks.QUERY}{task.query_suffix}'
    is_chat = bool(task.chat)
    text = [{'role': 'user', 'content': content}] if is_chat else content
    found = checks.tokens_of(directory, text)
    if found == context or is_chat or content == checks.QUERY:
        checks.check_tokens(directory, found, context)
    else:
        print(
            'note: the lines of the card encode prefix, query and suffix as one text. The training'
            ' encoded them one by one, and some tokens differ, as where a prefix ends with a space.'
        )


def _has_tokeniser(directory: str) -> bool:
    """Return whether transformers finds a tokeniser in a directory."""
    names = (tokenisers.TOKENISER, 'vocab.json')
    return any(os.path.exists(os.path.join(directory, name)) for name in names)


def _is_here(base: str) -> bool:
    """Return whether an adapter's base is on this machine; print a note if it is not."""
    if os.path.exists(base):
        return True
    print(f'note: the adapter was not loaded as a check: its base {base} would be downloaded')
    return False


def _base(of_base: record.Record) -> str:
    """Return the path or hub name from which PEFT can load the adapters' base model."""
    name = of_base.base
    for released_name in model_kinds.RELEASED:
        if name == model_kinds.directory_of(released_name):
            return storage.HUB + model_kinds.hub_name(released_name)
    is_there = storage.is_hub(name) or os.path.exists(name)
    is_whole = is_there and model_kinds.is_saved_by_transformers(name)
    if not is_whole or model_kinds.is_peft(name):
        raise UserError(f'--form adapter: PEFT cannot load the base {name}; leave --form out')
    return name


def _ends(task: lm_tasks.TaskHParams, encoder: Encoder) -> list[int]:
    """Return the ids of the tokens at which sampling stops, sorted."""
    return sorted(lm_tasks.truncate_tokens(task, encoder) or ()) if task.stops else []


def _write_generation_config(temperature: float, ends: list[int], output_dir: str) -> None:
    """Write the settings that make transformers' method `generate` sample as in training."""
    from transformers import GenerationConfig

    GenerationConfig(
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        repetition_penalty=1.0,
        eos_token_id=ends or None,
    ).save_pretrained(output_dir)


def _export_head(directory: str, output_dir: str, write_card: CardWriter) -> None:
    """Export a reward head together with the initial model whose hidden states the head reads."""
    head, about = load(directory)
    with warnings_only():
        reward = checked(directory, head, about)
    model = reward.reference.trained_model
    task, longest = task_of(about), model.sizes().n_ctx
    encoder = model.encoding.get_encoder()
    query, response = (
        torch.tensor([encoder.encode(each)]) for each in (checks.QUERY, checks.RESPONSE)
    )
    score = reward.score(query, response)
    model.as_transformers(reward.reference.model).save_pretrained(output_dir)
    model.encoding.write_tokeniser(output_dir)
    if not _has_tokeniser(output_dir):
        tokeniser.write_tokeniser(model.encoding, longest, output_dir, pads=False)
        model.encoding.write_files(output_dir)  # lets this program read the export, too
    responses = os.path.join(output_dir, RESPONSES)
    tokeniser.write_tokeniser(model.encoding, longest, responses, pads=False)
    head.save(output_dir, about)
    context = _context(task, encoder)
    _check_context(output_dir, task, context)
    found = checks.tokens_of(output_dir, checks.RESPONSE, RESPONSES)
    checks.check_tokens(output_dir, found, response[0].tolist())
    states = checks.states_of(output_dir, context + found, len(context))
    features = pooled(states[list(reward.blocks)], torch.ones(1, len(found), dtype=torch.bool))
    checks.check_numbers(output_dir, head(features)[0], score)
    ends = _ends(task, encoder)
    _write_generation_config(task.policy.temperature, ends, output_dir)
    write_card(output_dir, has_policy=False, blocks=reward.blocks, ends=ends, task=task)


def _reward_model_in(model_dir: str) -> trained_models.TrainedModel | None:
    """Return the reward model at a path or URL, or in a policy's run; None if there is none."""
    run, _, last = model_dir.rstrip('/').rpartition('/')
    if _has(model_dir, run_files.REWARD) and not _has(model_dir, run_files.POLICY):
        return saved_model(model_dir)
    is_own = is_model(model_dir)
    if last == run_files.REWARD.network and not is_own and _has(run or '.', run_files.POLICY):
        return saved_model(storage.join(run or '.', run_files.POLICY.network))
    if is_head(model_dir):
        return saved_model(model_dir)
    model = trained_models.TrainedModel(model_dir)
    if not model.is_reward_model():
        return None
    assert model.savedir is not None  # a reward model is always saved in a directory
    return saved_model(model.savedir)


def _has(directory: str, files: run_files.CommandFiles) -> bool:
    """Return whether a run (path or URL) has a saved network with the name `files.network`."""
    return is_model(storage.join(directory, files.network))


def _export_reward_model(
    saved: trained_models.TrainedModel, output_dir: str, write_card: CardWriter
) -> None:
    """Save a reward model as a sequence classifier for the library transformers."""
    location, *others = rewards.locations_of(saved.name)
    if others:
        raise UserError(
            f'{saved.name} is the mean of {1 + len(others)} reward models: export each of them,'
            ' such as RUN/reward_model and RUN/reward_model_1'
        )
    encoding, name, n_ctx = saved.encoding, saved.name, saved.sizes().n_ctx
    with warnings_only():
        model = rewards.TrainedRewardModel(location.directory, encoding, scope=location.scope)
    model.to('cpu')
    head = classifier.RewardHead.folded(
        model.model.heads['reward'], model.reward_gain, model.reward_bias
    )
    causal_lm = saved.as_transformers(model.model)
    made = classifier.classifier_of(causal_lm, head, encoding.n_vocab, name)
    made.save_pretrained(output_dir)
    constant = made.config.reward_constant
    del made, causal_lm  # frees memory: the check below loads the model again
    tokeniser.write_tokeniser(encoding, n_ctx, output_dir)

    encoder = encoding.get_encoder()
    expected = encoder.encode(checks.QUERY) + encoder.encode(checks.RESPONSE)
    found = checks.tokens_of(output_dir, checks.QUERY + checks.RESPONSE)
    checks.check_tokens(output_dir, found, expected)
    with precision.plain():
        tokens = expected[: n_ctx - 1]
        score = model.score(torch.tensor([tokens]), torch.tensor([[model.padding_token]]))
        checks.check_numbers(output_dir, checks.scores_of(output_dir, tokens) + constant, score)
    write_card(output_dir, has_policy=False, constant=constant)
