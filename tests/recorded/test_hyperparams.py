"""utils.hyperparams and the hyperparameter classes against hparams.json, and where we do better."""

import copy
import dataclasses
import importlib
import inspect
import json
import pkgutil
import typing
from dataclasses import dataclass, field

import pytest
from golden_data import ROOT, found, json_if_there

from lm_human_preferences import hparams as options
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams import policy_options, reward_options
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import fields, group_class, members

RECORDED = json_if_there('hparams.json', default={'cases': [], 'synthetic_classes': ''})
TASK = {'task.query_length': 5, 'task.query_dataset': 'books', 'task.response_length': 4}
TASK['task.policy.initial_model'] = '124M'


def _classes():
    scope = {
        'hyperparams': hyperparams,
        'field': field,
        'dataclass': dataclass,
        '__name__': __name__,
        **vars(typing),
    }
    exec(RECORDED['synthetic_classes'].replace('class ', '@dataclass\nclass '), scope)
    return {
        'train_policy.HParams': policy_options.HParams,
        'train_reward.HParams': reward_options.CommandHParams,
        'Synthetic': scope.get('Synthetic'),
    }


CLASSES = _classes()


def _settings(call):
    """[(key, value)] of what a call overrides by dotted names."""
    method, argument = call
    if method == 'override_from_str':
        return [tuple(pair.split('=', 1)) for pair in argument.split(',')]
    return list(argument.items()) if method.endswith('dict') and 'nested' not in method else []


def _override(hparams, method, argument):
    """Make a recorded call; a dictionary of texts is parsed as the command line parses it."""
    if method in ('override_from_nested_dict', 'parse_json'):
        nested = json.loads(argument) if method == 'parse_json' else argument
        hparams.override_from_nested_dict(nested)
        return
    if method == 'override_from_str_dict':
        method = 'override_from_dict'
        types = {key: hparams._field(key).type for key in argument}
        argument = {key: hyperparams.parse(types[key], argument[key]) for key in argument}
    getattr(hparams, method)(argument)


def _unknown(cls, nested):
    """Return whether a nested dict has a key that no field has."""
    return any(
        key not in fields(cls)
        or (
            isinstance(value, dict)
            and group_class(fields(cls)[key].type)
            and _unknown(group_class(fields(cls)[key].type), value)
        )
        for key, value in nested.items()
    )


def _defect(case):
    """Why a recorded case does not hold for us, or None."""
    cls, result, earlier = CLASSES[case['cls']], case['result'], []
    for call in case['calls']:
        if len(call) > 2:
            return 'no caller has another separator'
        settings = _settings(call)
        if any(len(setting) < 2 for setting in settings):
            continue  # a text that is not NAME=VALUE
        if call[0] == 'override_from_str_dict' and any(type(v) is dict for _, v in settings):
            return 'no caller has another value than a text'
        for key, value in settings:
            known = fields(cls).get(key)
            ty = known and known.type
            parents = [key[:i] for i in range(len(key)) if key[i:].startswith('.')]
            if (
                value == 'on'
                and ty
                and group_class(ty)
                and any(k.startswith(p) for k in earlier for p in parents)
            ):
                return 'original-defects 10: a group switched on reset those around it'
            if call[0].startswith('override_from_str') and value == 'None' and ty == (str | None):
                return 'original-defects 11: Optional[str] could not be set to None'
            if ty and len(set(members(ty)) - {type(None)}) > 1:
                return 'original-defects 11: no option is a Union other than Optional'
            if key.endswith('penalty_reward_value') and '.' in str(value):
                return 'task.penalty_reward_value may be a fraction'
            if (
                key.endswith('num_train')
                and value in (None, 'None', 'none', '')
                and 'error' in result
            ):
                return 'labels.num_train may be None: all labels'
        earlier += [key for key, _ in settings]
        if (
            call[0] == 'override_from_nested_dict' and 'nested' in result and _unknown(cls, call[1])
        ) or (
            call[0] == 'parse_json' and 'nested' in result and _unknown(cls, json.loads(call[1]))
        ):
            return 'original-defects 12: unknown names were accepted'
    verdict = result.get('validate')
    if isinstance(verdict, dict) and 'num_train must be int' in verdict['message']:
        return 'labels.num_train may be None: all labels'
    rewards = result.get('nested', {}).get('rewards') or {}
    made = ((rewards.get('train_new_model') or {}).get('run') or {}).get('save_dir')
    if verdict and made and rewards['trained_model'] == f'{made}/reward_model':
        return 'original-defects 13: the hyperparameters of a finished run were invalid'
    return None


def _raised(function):
    """Names of the classes of the exception that `function` raises."""
    try:
        function()
    except Exception as e:
        return [cls.__name__ for cls in type(e).__mro__]
    return []


@pytest.mark.parametrize(
    'case', RECORDED['cases'], ids=lambda case: f'{case["cls"]}-{json.dumps(case["calls"])[:80]}'
)
def test_recorded(case):
    if _defect(case):
        pytest.skip(_defect(case))
    hparams, result = CLASSES[case['cls']](), case['result']
    for i, call in enumerate(case['calls']):
        raised = _raised(lambda call=call: _override(hparams, *call))
        if result.get('at_call') == i:
            assert result['error'] in raised
            return
        assert not raised
    assert json.dumps(hparams.to_nested_dict()) == json.dumps(result['nested'])
    if result.get('validate') == 'ok':
        hparams.validate()
    elif 'validate' in result:
        assert result['validate']['error'] in _raised(hparams.validate)


@pytest.mark.parametrize(
    'path', found('*/train_*_hparams.json') + found('*/*/train_*_hparams.json')
)
def test_saved_by_the_original(path):
    """Original-defects 13: what a run saved validates, with both ways to a reward model in it."""
    hparams = CLASSES['train_policy.HParams' if 'policy' in path else 'train_reward.HParams']()
    hparams.override_from_json_file(str(ROOT / path))
    hparams.validate()
    text = (ROOT / path).read_text(encoding='utf-8')
    assert json.dumps(hparams.to_nested_dict(), indent=2) == text


@pytest.mark.parametrize('path', found('*/train_*_hparams.json'))
def test_dump_as_recorded(path, capsys):
    directory = path.split('/')[0]
    printed = ROOT / f'{directory}_inputs' / 'stdout.txt'
    if not printed.exists():
        pytest.skip(f'{printed} is not in the golden set')
    hparams = CLASSES['train_policy.HParams' if 'policy' in path else 'train_reward.HParams']()
    hparams.override_from_json_file(str(ROOT / path))
    hyperparams.dump(hparams)
    assert capsys.readouterr().out in printed.read_text(encoding='utf-8')


def policy_hparams(**overrides):
    hparams = policy_options.HParams()
    hparams.override_from_dict({**TASK, 'rewards.trained_model': 'x', **overrides})
    return hparams


def test_on_keeps_the_groups_around_it():
    """Original-defects 10."""
    hparams = policy_hparams(**{'rewards.kl_coef': 0.7})
    hparams.override_from_dict({'rewards.train_new_model': 'on'})
    hparams.override_from_dict({'rewards.adaptive_kl': 'on', 'rewards.adaptive_kl.target': 6.0})
    assert (hparams.rewards.kl_coef, hparams.rewards.trained_model) == (0.7, 'x')
    assert hparams.rewards.train_new_model == reward_options.HParams()
    assert hparams.rewards.adaptive_kl == policy_options.AdaptiveKLParams(target=6.0)


@pytest.mark.parametrize(
    'method, argument',
    [
        ('override_from_dict', {'ppo.nosuch': 1}),
        ('override_from_nested_dict', {'ppo': {'nosuch': 1}}),
    ],
)
def test_unknown_name(method, argument):
    """Original-defects 12: one error, which is both of those that the original raised."""
    with pytest.raises(AttributeError, match='HParams has no field .*nosuch') as caught:
        getattr(policy_options.HParams(), method)(argument)
    assert isinstance(caught.value, KeyError)


@pytest.mark.parametrize(
    'settings, error, message',
    [
        ({'task.query_length': None}, TypeError, '--task.query_length must be given: tokens of a'),
        ({'ppo.lr': 'a'}, TypeError, "--ppo.lr must be a number (float), got 'a'"),
        ({'ppo.batch_size': 9, 'ppo.nminibatches': 2}, ValueError, '--ppo.batch_size 9 is not a'),
        ({'ppo.batch_size': 16, 'ppo.nminibatches': 4}, AssertionError, '--ppo.batch_size 16 in 4'),
        ({'rewards.trained_model': None}, AssertionError, 'give one reward: --rewards.trained_'),
    ],
)
def test_invalid(settings, error, message):
    with pytest.raises(error) as caught:
        policy_hparams(**settings).validate()
    assert str(caught.value).startswith(message)


def test_a_group_is_named_after_its_place_however_it_came_there():
    alone = reward_options.HParams()
    assert alone.labels.option_name('type') == '--labels.type'
    hparams = policy_hparams(**{'rewards.train_new_model': 'on'})
    new_model = hparams.rewards.train_new_model
    assert new_model.labels.option_name('type') == '--rewards.train_new_model.labels.type'
    assert copy.deepcopy(new_model).option_name('lr') == '--rewards.train_new_model.lr'
    hparams.rewards.train_new_model = alone
    assert alone.labels.option_name('type') == '--rewards.train_new_model.labels.type'
    assert hparams.rewards.option_name('train_new_model.lr') == alone.option_name('lr')
    assert hparams.option_name('task.end_text') == hparams.task.option_name('end_text')
    assert alone == new_model and repr(alone) == repr(new_model)


NEW = 'rewards.train_new_model'


@pytest.mark.parametrize(
    'settings, ranks, fact',
    [
        ({'ppo.batch_size': 512, 'ppo.nminibatches': 4}, 6, '--mpi 6 x --ppo.nminibatches 4 = 24'),
        ({f'{NEW}.batch_size': 33, NEW: 'on'}, 2, '--mpi 2: use 32 or 34'),
        ({'ppo.batch_size': 64, 'ppo.samples_per_query': 32}, 4, '--mpi 4 x --ppo.samples_per_qu'),
    ],
)
def test_batches_that_ranks_cannot_share(settings, ranks, fact):
    hparams = policy_hparams(**settings)
    hparams.check_ranks(1)
    with pytest.raises(UserError) as caught:
        hparams.check_ranks(ranks)
    option, value = next(iter(settings.items()))
    assert str(caught.value).startswith(f'--{option} {value} ') and fact in str(caught.value)


def test_repr_as_the_original():
    run = reward_options.RunHParams(seed=1)
    assert repr(run) == 'RunHParams(seed=1, log_interval=10, save_interval=50, save_dir=None)'


@pytest.mark.parametrize('cls', [policy_options.HParams, reward_options.CommandHParams])
def test_every_leaf_has_a_line_of_help(cls):
    for key, known in fields(cls).items():
        if not group_class(known.type) or known.default is None:
            assert 3 < len(known.metadata['help']) < 120, key


def option_classes():
    for module in pkgutil.iter_modules(options.__path__):
        found = importlib.import_module(f'{options.__name__}.{module.name}')
        for value in vars(found).values():
            is_own = isinstance(value, type) and value.__module__ == found.__name__
            if is_own and issubclass(value, hyperparams.HParams) and not inspect.isabstract(value):
                yield value


@pytest.mark.parametrize(
    'cls, name, least',
    [
        pytest.param(cls, own.name, least, id=f'{cls.__module__.rpartition(".")[2]} {own.name}')
        for cls in option_classes()
        for own in dataclasses.fields(cls)
        if (least := own.metadata.get('at_least')) is not None
    ],
)
def test_every_class_of_options_checks_their_values(cls, name, least):
    hparams = cls()
    setattr(hparams, name, least - 1)
    with pytest.raises((TypeError, ValueError), match=' must be '):
        hparams.validate()


def test_a_class_of_a_fork_checks_itself_as_in_the_original():
    """Its fields need no option(), and its validate passes the prefix on."""

    @dataclass
    class Scaling(hyperparams.HParams):
        factor: float = 2.0

        def validate(self, *, prefix=''):
            super().validate(prefix=prefix)
            assert self.factor, f'{prefix}factor'

    scaling = Scaling()
    scaling.override_from_dict({'factor': 0.5})
    scaling.validate()
    scaling.factor = 'x'
    with pytest.raises(TypeError, match='--ppo.factor must be a number'):
        scaling.validate(prefix='ppo.')
