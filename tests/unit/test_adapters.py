"""Adapters (LoRA): layers, one frozen base, and the files of a run that trains them."""

import json
import re
import shutil
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from command_line import error_of, invoke, succeed
from experiments import resolved
from interrupted import STEP, assert_same, failing
from online_runs import WORDS as ONLINE
from online_runs import online_result
from ranks import on_ranks
from safetensors.torch import load_file, save_file
from tiny_causal_lms import WAYS, both_steps, tiny
from tiny_tokenisers import write_byte_level

from lm_human_preferences import train_reward
from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.tf_bundle import Bundle
from lm_human_preferences.commands import export_model
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import UserError
from lm_human_preferences.language.adapters import layers, record, shared
from lm_human_preferences.language.model import Projection
from lm_human_preferences.language.networks import model_kinds
from lm_human_preferences.language.networks.network import Linear
from lm_human_preferences.language.networks.weights import load_parameters
from lm_human_preferences.language.texts import tokenisers
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.machine import precision
from lm_human_preferences.plan.phases import policy_phase, reward_phase
from lm_human_preferences.rewards import TrainedRewardModel
from lm_human_preferences.runs import run_files
from lm_human_preferences.utils.core import digest_of

NEW = '--rewards.train_new_model'
LORA = '--task.policy.lora on --task.policy.lora.rank 2 --ppo.lr 1e-3'
BOTH = pytest.mark.parametrize('model', ['llama', 'gpt2'], indirect=True)


@pytest.fixture(scope='module')
def model(request, tmp_path_factory):
    family = getattr(request, 'param', 'llama')
    return make_model(tmp_path_factory.mktemp(family) / 'model', family)


def make_model(directory, family):
    directory.mkdir(parents=True, exist_ok=True)
    write_byte_level(directory)
    tokens = tokenisers.encoding_in(str(directory)).n_vocab
    rows = tokens if family == 'gpt2' else tokens + 48
    tiny(family, vocab_size=rows).save_pretrained(directory)
    return directory


def line(model, directory, more=''):
    return both_steps(model, directory, f'{NEW}.lr 1e-3 {LORA} {more}')


@pytest.fixture(scope='module')
def trained(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp('trained')
    with mock.patch.object(shared, 'digest_of', wraps=digest_of) as read:
        succeed(line(model, folder, f'{NEW}.lora.rank 3'))
    assert read.call_count == 1  # of a base that the reward model and the policy share
    return folder / 'run'


def base_of(model):
    hparams = resolved('train_policy', 'test')
    for prefix in ('task.policy.', 'rewards.train_new_model.task.policy.'):
        hparams.override_from_dict({f'{prefix}initial_model': str(model), f'{prefix}lora': 'on'})
    return shared.Bases().under(
        TrainedModel(str(model)), policy_phase(hparams).adapters, hparams.run, 'policy', Comm()
    )


@pytest.mark.parametrize('kind', [Linear, Projection])
def test_layers_and_their_gradients_are_those_of_a_dense_layer(kind):
    torch.manual_seed(1)
    layer = kind(5, 7).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
        parameter.requires_grad_(False)
    layer.__class__ = layers._ADAPTED[kind]
    layer.add_adapter(3, 4 / 3)
    layer.reset()
    assert not layer.lora_B.any() and layer.lora_A.abs().max() <= 5**-0.5
    torch.nn.init.normal_(layer.lora_B)
    layer.double()
    x = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)

    def dense():
        weight = layer.weight if kind is Linear else layer.weight.T
        return x @ (weight + 4 / 3 * layer.lora_B @ layer.lora_A).T + layer.bias

    of_output = torch.randn(11, 7, dtype=torch.float64)
    learned = (layer.lora_A, layer.lora_B, x)
    found, expected = layer(x), dense()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    gradients = torch.autograd.grad((found * of_output).sum(), learned)
    for gradient, other in zip(
        gradients, torch.autograd.grad((expected * of_output).sum(), learned), strict=True
    ):
        torch.testing.assert_close(gradient, other, rtol=0, atol=1e-10)
    if kind is Projection:
        gelu = torch.nn.functional.gelu(expected, approximate='tanh')
        torch.testing.assert_close(layer(x, gelu=True), gelu, rtol=0, atol=1e-10)


@BOTH
def test_networks_share_the_base_which_never_changes(model):
    base = base_of(model)
    policy = base.build(scope='policy', scalar_heads=['value'])
    reference = base.build(scope='ref_policy', scalar_heads=['value'])
    reward = base.build(scope='reward_model', scalar_heads=['reward'])
    for name, parameter in base.parameters.items():
        for network in (policy, reference, reward):
            assert dict(network.named_parameters())[name] is parameter
    assert {name.split('.')[0] for name in reference.own_parameters()} == {'heads'}
    tokens = torch.arange(12).reshape(2, 6)
    assert torch.equal(policy.hidden(tokens), reference.hidden(tokens))
    optimizer = torch.optim.SGD(policy.own_parameters().values(), lr=1.0)
    for _ in range(2):
        policy.logits(policy.hidden(tokens)).square().sum().backward()
        optimizer.step()
    assert not torch.equal(policy.hidden(tokens), reference.hidden(tokens))
    assert all(each.grad is None for each in base.parameters.values())
    assert digest_of(base.parameters) == base.digest


@BOTH
def test_a_policy_is_read_with_its_adapters_merged(model, trained):
    tokens = torch.arange(30).reshape(2, 15)
    begun = TrainedModel(str(model)).build(scope='policy')
    merged = TrainedModel(str(trained)).build(scope='policy')
    saved = TrainedModel(str(trained / 'policy'))
    network = base_of(model).create_like(saved, ['value'], 'policy')
    assert network.shared
    assert load_parameters(saved.open_weights(), network.own_parameters(), 'policy') == []

    def logprobs(network):
        return network.logits(network.hidden(tokens)).log_softmax(-1)

    torch.testing.assert_close(logprobs(merged), logprobs(network), rtol=0, atol=1e-5)
    assert (logprobs(merged) - logprobs(begun)).abs().max() > 1e-3
    reference = TrainedModel('ref', str(trained / 'policy'), 'ref_policy').build(scope='ref')
    assert torch.equal(logprobs(reference), logprobs(begun))


def test_a_reward_model_scores_alike_by_itself_and_on_a_shared_base(model, trained):
    encoding = TrainedModel(str(model)).encoding
    base = base_of(model)
    queries, responses = torch.arange(20).reshape(2, 10), torch.arange(40, 56).reshape(2, 8)
    found = []
    for place in (trained / 'reward_model', trained / 'policy'):
        for shares in (base, None):
            scorer = TrainedRewardModel(str(place), encoding, base=shares)
            assert bool(scorer.model.shared) == (shares is base)
            found.append(scorer.get_rewards(queries, responses))
    for rewards in found[1:]:
        torch.testing.assert_close(rewards, found[0], rtol=1e-5, atol=1e-5)
    of_reward = record.read(str(trained / 'policy')).options('reward_model_2')
    assert (of_reward.rank, record.read(str(trained / 'policy')).options('policy').rank) == (3, 2)


def test_a_checkpoint_holds_adapters_and_heads_and_all_files_are_the_runs_own(model, trained):
    bundle = Bundle(checkpoints.latest(str(trained / 'policy/checkpoints')))
    scopes = {'policy', 'ref_policy', 'reward_model'}
    for name in bundle:
        scope, _, parameter = name.partition('/')
        is_own = re.search(r'lora_[AB]|heads|reward_(norm|gain|bias)', parameter)
        assert scope not in scopes or is_own, name
    own = run_files.written_by(run_files.COMMANDS)
    files = [str(path.relative_to(trained)) for path in trained.rglob('*') if path.is_file()]
    assert [name for name in files if not own.fullmatch(name)] == []
    assert 'policy/adapter.json' in files


def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path):
    model = make_model(tmp_path / 'model', 'gpt2')
    online = ' '.join(ONLINE).replace('total_episodes=640', 'total_episodes=384')
    words = (
        f'train_policy test run --mpi 1 {online} {LORA} --rewards.ensemble 2'
        f' --task.policy.initial_model={model}'
        f' {NEW}.task.policy.initial_model={model} --save_dir {tmp_path}'
    )
    succeed(f'{words}/whole')
    with failing(STEP, 4):
        assert invoke(f'{words}/stopped').exit_code == 2
    succeed(f'resume {tmp_path}/stopped/run')
    assert_same(online_result(tmp_path / 'stopped/run'), online_result(tmp_path / 'whole/run'))


def test_another_base_is_refused(model, tmp_path):
    base = shutil.copytree(model, tmp_path / 'model')
    succeed(line(base, tmp_path))
    directory = tmp_path / 'run'
    tensors = load_file(base / 'model.safetensors')
    next(iter(tensors.values())).flatten()[0] += 1
    save_file(tensors, base / 'model.safetensors', {'format': 'pt'})
    refused = invoke(f'resume {directory} --ppo.total_episodes 256')
    message = f'error: {base} differs from the model {base} on which the run in {directory} began'
    assert refused.exit_code == 2 and message in refused.stderr
    shutil.rmtree(base)
    message = error_of(invoke(f'export {directory} {tmp_path}/out'))
    told = f'{directory}/policy holds adapters of the model {base}, which is not on this machine'
    assert told in message


def test_memory_and_checkpoints_are_planned_for_adapters(model, tmp_path):
    numbers, full = planned(model, 'off', 'fp32', 'cuda')
    assert full == planned(model, 'off', 'fp32', 'cpu')[1] == 4 * (3 + 3) * numbers
    # Of three networks one learns; a CPU keeps a prepacked copy of the base.
    learned, lean = planned(model, 'on', 'fp32', 'cuda')
    assert 0 < learned < numbers / 3
    assert lean == 4 * (numbers + 6 * learned)
    assert planned(model, 'on', 'fp32', 'cpu')[1] == 4 * (2 * numbers + 6 * learned)
    halved = planned(model, 'on', 'bf16', 'cuda')[1]
    assert halved == 2 * numbers + (3 * 6 + 3 * 4) * learned
    refused = error_of(invoke('train_policy test run --task.policy.lora on --dry_run'))
    assert refused.startswith('--task.policy.lora needs a base that stays the same')


def planned(model, lora, precision, device):
    """The number of parameters that learn, and the bytes that last."""
    hparams = resolved('train_policy', 'test', {'task.policy.lora': lora})
    hparams.run.precision = precision
    if lora == 'on':
        hparams.task.policy.lora.rank = 1
    phase, initial_model = policy_phase(hparams), TrainedModel(str(model))
    sizes = shared.with_learned(initial_model.sizes(), initial_model.create, phase.adapters)
    work = {'rows': 0, 'micro_batch_size': None, 'tokens': 1, 'predicted': 0}
    memory = phase.networks.memory(sizes, hparams.run, torch.device(device), **work)
    return sizes.own_parameters(), memory


@BOTH
def test_peft_loads_an_exported_policy(model, trained, tmp_path):
    import peft  # takes seconds
    from transformers import AutoModelForCausalLM

    succeed(f'export {trained} {tmp_path}/out --form adapter')
    config = json.loads((tmp_path / 'out/adapter_config.json').read_text())
    assert (config['base_model_name_or_path'], config['revision']) == (str(model), None)
    base = AutoModelForCausalLM.from_pretrained(model)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / 'out')
    network = TrainedModel(str(trained)).build(scope='policy')
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        expected = network.logits(network.hidden(tokens)).log_softmax(-1)
        found = theirs(input_ids=tokens).logits[..., : expected.shape[-1]].log_softmax(-1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


LAYERS = '(q|down)_proj|c_(attn|proj)'
HEAD, TABLE = 'lm_head', 'embed_tokens|wte'
PATTERNS = {
    'rank_pattern': {r'[0h]\..*(q_proj|c_attn)': 2, 'mlp.c_proj': 4},
    'alpha_pattern': {r'.*\.1\..*(c_attn|q_proj)': 3, 'down_proj': 11, 'h.0.mlp.c_proj': 7},
}
# {name: (layers, settings)} of adapters as PEFT saves them; TABLE stands for the embedding's name
PEFT = {
    'patterns': (LAYERS, {**PATTERNS, 'use_rslora': True, 'use_dora': True}),
    'head': (f'{LAYERS}|{HEAD}', {}),
    'head and embedding': (f'{HEAD}|{TABLE}', {}),
    'whole head': (LAYERS, {'modules_to_save': [HEAD]}),
    'whole embedding': (LAYERS, {'modules_to_save': [TABLE]}),
    'both tied': (LAYERS, {'modules_to_save': [TABLE, HEAD], 'ensure_weight_tying': True}),
    'tokens': (LAYERS, {'trainable_token_indices': [3, 8]}),
    'tokens and head': (f'{LAYERS}|{HEAD}', {'trainable_token_indices': {TABLE: [3, 8]}}),
    'tokens of both': (LAYERS, {'trainable_token_indices': {TABLE: [3], HEAD: [5, 8]}}),
    'pissa': (LAYERS, {'init_lora_weights': 'pissa'}),
    'larger': (LAYERS, {}),  # a vocabulary that has grown
}
# Of a tied output layer and embedding, and of one that is not, though the config says so
TIED = ['head and embedding', 'whole head', 'whole embedding', 'both tied', 'tokens of both']


@pytest.mark.parametrize(
    'family, says_tied, is_tied, kind',
    [
        *(('gpt2', False, False, kind) for kind in PEFT),
        *(('llama', True, True, kind) for kind in (*TIED, 'larger', 'tokens and head')),
        *(('llama', True, False, kind) for kind in ('head', 'whole embedding', 'tokens')),
    ],
)
def test_an_adapter_is_what_peft_computes(tmp_path, family, says_tied, is_tied, kind):
    import peft  # takes seconds

    base = tmp_path / 'base'
    base.mkdir()
    write_byte_level(base)
    tokens = tokenisers.encoding_in(str(base)).n_vocab
    tiny(family, vocab_size=tokens, tie_word_embeddings=is_tied).save_pretrained(base)
    config = json.loads((base / 'config.json').read_text())
    (base / 'config.json').write_text(json.dumps({**config, 'tie_word_embeddings': says_tied}))
    layers, settings = PEFT[kind]
    table = 'wte' if family == 'gpt2' else 'embed_tokens'
    named = json.loads(json.dumps(settings).replace(TABLE, table))
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=f'.*({layers})', **named)
    if is_tied and kind == 'tokens and head':
        # PEFT itself merges another model.
        with pytest.raises(UserError, match='merging the adapter changes outputs, by up to'):
            assert_peft_computes_it(base, tmp_path / 'adapter', config)
        return
    assert_peft_computes_it(base, tmp_path / 'adapter', config, rows=4 * (kind == 'larger'))


def test_another_kind_than_lora_is_what_peft_computes(tmp_path):
    import peft  # takes seconds

    base = make_model(tmp_path / 'base', 'llama')
    modules = ['q_proj', 'down_proj']
    config = peft.IA3Config(target_modules=modules, feedforward_modules=modules[1:])
    assert_peft_computes_it(base, tmp_path / 'adapter', config)


def assert_peft_computes_it(base, directory, config, rows=0):
    """Save a trained adapter, and load it with PEFT and here. rows: that the vocabulary gains."""
    import peft  # takes seconds
    from transformers import AutoModelForCausalLM

    def model():
        loaded = AutoModelForCausalLM.from_pretrained(base)
        if rows:
            torch.manual_seed(2)
            loaded.resize_token_embeddings(loaded.config.vocab_size + rows, mean_resizing=False)
        return loaded

    torch.manual_seed(1)
    trained = peft.get_peft_model(model(), config)
    with torch.no_grad():
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    trained.save_pretrained(directory, save_embedding_layers=True if rows else 'auto')
    theirs = peft.PeftModel.from_pretrained(model(), directory).eval()
    network = TrainedModel(str(directory)).build(scope='policy')
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        found = network.logits(network.hidden(tokens)).log_softmax(-1)
        logits = theirs(input_ids=tokens).logits[..., : found.shape[-1]]
    torch.testing.assert_close(found, logits.log_softmax(-1), rtol=0, atol=1e-4)


def adapter(model, directory, tensors=(), **settings):
    llama = 'model.layers.0.mlp.up_proj'
    shapes = {f'{llama}.lora_A': (2, 32), f'{llama}.lora_B': (48, 2)}
    values = {f'base_model.model.{name}.weight': torch.ones(shapes[name]) for name in shapes}
    config = {'peft_type': 'LORA', 'base_model_name_or_path': str(model), 'r': 2, 'lora_alpha': 4}
    config |= {'target_modules': ['layers.0.mlp.up_proj']}
    directory.mkdir(exist_ok=True)
    (directory / 'adapter_config.json').write_text(json.dumps({**config, **settings}))
    file = directory / 'adapter_model.safetensors'
    save_file({} if tensors is None else {**values, **dict(tensors)}, file)
    return directory


def test_a_run_that_begins_with_an_adapter_of_peft_records_it_and_its_base(tmp_path):
    model = make_model(tmp_path / 'model', 'llama')
    directory = adapter(model, tmp_path / 'adapter')
    succeed(line(directory, tmp_path))
    assert record.read(str(tmp_path / 'run/policy')).base == str(directory)
    refused = error_of(invoke(f'export {tmp_path}/run {tmp_path}/out --form adapter'))
    assert refused == f'--form adapter: PEFT cannot load the base {directory}; leave --form out'


def test_a_released_model_is_called_as_on_the_hub(trained, monkeypatch):
    of_base = record.read(str(trained / 'policy'))
    released = replace(of_base, base='gs://gpt-2/models/355M')
    assert export_model._base(released) == 'hf://openai-community/gpt2-medium'
    on_hub = replace(of_base, base='hf://org/name@' + 40 * '0')
    monkeypatch.setattr(model_kinds, 'is_saved_by_transformers', lambda _: True)
    monkeypatch.setattr(model_kinds, 'is_peft', lambda _: False)
    assert export_model._base(on_hub) == on_hub.base


def test_adapters_of_a_model_that_is_not_here_are_exported_without_it(
    trained, tmp_path, monkeypatch
):
    base = 'hf://org/name@' + 40 * '0'
    monkeypatch.setattr(export_model, '_base', lambda *_: base)
    monkeypatch.setattr(TrainedModel, 'build', lambda *_, **__: pytest.fail('the base is read'))
    printed = succeed(f'export {trained} {tmp_path}/out --form adapter').output
    told = 'note: the adapter was not loaded as a check: its base org/name would be downloaded'
    assert told in printed
    config = json.loads((tmp_path / 'out/adapter_config.json').read_text())
    assert (config['base_model_name_or_path'], config['revision']) == ('org/name', 40 * '0')


TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}</s>{% endfor %}"


def test_a_tokeniser_beside_an_adapter_replaces_that_of_its_base(tmp_path):
    model = make_model(tmp_path / 'model', 'llama')
    (model / 'chat_template.jinja').write_text('of the base')
    (model / 'generation_config.json').write_text('{"eos_token_id": [7]}')
    directory = adapter(model, tmp_path / 'adapter')

    def settings():
        encoder = TrainedModel(str(directory)).encoding.get_encoder()
        return encoder.own.chat_template, set(encoder.own_ends())

    assert settings() == ('of the base', {7})
    write_byte_level(directory, size=300, chat_template=TEMPLATE)
    assert settings() == (TEMPLATE, {7})
    (directory / 'generation_config.json').write_text('{"eos_token_id": [5, 6]}')
    assert settings() == (TEMPLATE, {5, 6})
    encoding = TrainedModel(str(directory)).encoding
    assert encoding.name != tokenisers.read(str(model)).name
    encoding.copy_files(str(tmp_path / 'copy'))
    copied = tokenisers.read(str(tmp_path / 'copy'))
    assert (copied.name, copied.get_encoder().own.chat_template) == (encoding.name, TEMPLATE)


def test_an_adapter_is_no_reward_model(tmp_path):
    model = make_model(tmp_path / 'model', 'llama')
    head = {'base_model.model.score.weight': torch.ones(1, 32)}
    directory = adapter(model, tmp_path / 'adapter', head, task_type='SEQ_CLS')
    (tmp_path / 'texts.jsonl').write_text('{"query": "a", "response": "b"}')
    told = f'{directory} is an adapter, not a reward model: merge it'
    assert told in error_of(invoke(f'score {directory} {tmp_path}/texts.jsonl'))


A_NAME = 'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
HOSTILE = {
    'shape': ({A_NAME: torch.ones(2, 31)}, {}, 'PEFT cannot merge it: '),
    'nan': ({A_NAME: torch.full((2, 32), torch.nan)}, {}, 'PEFT cannot merge it: NaN'),
    'other layer': (
        {'base_model.model.x.lora_A.weight': torch.ones(2)},
        {},
        "not fit the adapter's base model: base_model.model.x",
    ),
    'missing': ({}, {'target_modules': ['up_proj', 'q_proj']}, 'more; unwrap the PEFT model'),
    'no kind': ({}, {'peft_type': 3}, 'does not describe adapters'),
    'kind': ({}, {'peft_type': 'PREFIX_TUNING'}, 'of type PREFIX_TUNING cannot be merged'),
    'import': ({}, {'megatron_config': {'a': 1}, 'megatron_core': 'this'}, 'megatron_config'),
    'no pattern': ({}, {'alpha_pattern': {'(': 4}}, 'PEFT cannot merge it: '),
    'endless': ({}, {'rank_pattern': {'([a-z0-9_.]+)+!': 4}}, 'a pattern that may take for ever'),
    'slow': ({}, {'exclude_modules': 9 * '.*a'}, 'a pattern that may take for ever'),
    'no tensors': (None, {}, 'more; unwrap the PEFT model'),
    'base': ({}, {'base_model_name_or_path': '/nowhere/at/all'}, "unknown model '/nowhere/at/all'"),
    'no base': ({}, {'base_model_name_or_path': None}, 'base_model_name_or_path is None: set it'),
    'itself': ({}, {'base_model_name_or_path': 'HERE'}, 'is not a whole model'),
}


@pytest.mark.parametrize('case', HOSTILE)
def test_hostile_adapters_are_refused_in_one_line(tmp_path, case):
    tensors, settings, told = HOSTILE[case]
    model = make_model(tmp_path / 'model', 'llama')
    if settings.get('base_model_name_or_path') == 'HERE':
        settings = {'base_model_name_or_path': str(tmp_path / 'adapter')}
    directory = adapter(model, tmp_path / 'adapter', tensors, **settings)
    assert told in error_of(invoke(f'export {directory} {tmp_path}/out'))


def test_pickles_of_adapters_are_not_read(tmp_path):
    directory = adapter(make_model(tmp_path / 'model', 'llama'), tmp_path / 'adapter')
    (directory / 'adapter_model.safetensors').rename(directory / 'adapter_model.bin')
    assert 'is damaged or missing' in error_of(invoke(f'export {directory} {tmp_path}/out'))


def reward_losses(model, lora, ranks=1, settings=None):
    hparams = resolved('train_reward', 'test')
    of_policy = {'task.policy.initial_model': str(model), 'task.policy.lora': lora}
    hparams.override_from_dict({**of_policy, **(settings or {})})
    precision.configure(hparams.run.precision, torch.device('cpu'), 'default')

    def work(comm):
        torch.manual_seed(1)
        base = TrainedModel(str(model))
        phase = reward_phase(hparams)
        base = shared.Bases().under(base, phase.adapters, hparams.run, 'reward_model', comm)
        trainer, _ = train_reward.build_trainer(phase, base, comm)
        network, generator = trainer.reward_model.model, torch.Generator().manual_seed(1)
        torch.nn.init.constant_(network.heads['reward'].w, 0.1)
        for name, parameter in network.named_parameters():
            if 'lora_A' in name:  # threads share the generator that draws it
                bound = parameter.shape[1] ** -0.5
                parameter.data.uniform_(-bound, bound, generator=generator)
        batches = np.arange(128).reshape(4, 32)
        mine = slice(comm.rank, None, comm.size)
        losses = [trainer.train_batch(batch[mine], lr=1e-2)['loss'] for batch in batches]
        kept = {parameter.dtype for parameter in network.parameters()}
        return [float(loss) for loss in losses], kept

    return on_ranks(ranks, work)[0]


@pytest.mark.parametrize(
    'lora, model, way',
    [
        *(('on', 'gpt2', way) for way in WAYS),
        *(('off', 'llama', way) for way in ('ranks', 'gradient checkpointing')),
    ],
    indirect=['model'],
)
def test_ways_to_train_learn_the_same(model, way, lora):
    """bf16 nearly so: there the base of adapters is kept in it."""
    plain, _ = reward_losses(model, lora)
    other, kept = reward_losses(model, lora, *WAYS[way])
    learned = abs(plain[-1] - plain[0])
    assert learned > 0.01
    assert other == pytest.approx(plain, abs=0.2 * learned if way == 'bf16' else 2e-5)
    assert (torch.bfloat16 in kept) == (way == 'bf16' and lora == 'on')
    if way == 'gradient checkpointing' and lora == 'off':
        assert other == plain
