"Promise 7: a wrong argument raises ValueError or TypeError with the value"
import re

import pytest, torch, torch.nn.functional as F
from torch import nn

import adapter as A

nan, inf = torch.nan, torch.inf


def refused(f, *values):
    "ValueError or TypeError, and each value stands in the text"
    with pytest.raises((ValueError, TypeError)) as e: f()
    text = str(e.value)
    for v in values:
        found = any(re.search(re.escape(s), text) for s in {str(v), repr(v), f'{v:g}' if isinstance(v, float) else str(v)})
        assert found, f'{v!r} is not in: {text}'


@pytest.mark.parametrize('scale', (0., -1., nan, inf, -inf, 2.**200))
@pytest.mark.parametrize('policy', ('static', 'dynamic', 'hysteresis', 'megatron', 'als', 'logmax', 'fairseq'))
def test_a_scale_that_cannot_work(policy, scale): refused(lambda: A.make_scaler(policy, init_scale=scale), scale)


@pytest.mark.parametrize('name, value', (('growth_factor', 1.), ('growth_factor', .5), ('growth_factor', nan), ('backoff_factor', 1.),
                                         ('backoff_factor', 0.), ('backoff_factor', 2.), ('growth_interval', 0), ('growth_interval', -3),
                                         ('growth_interval', 2.5), ('min_scale', 2.**20), ('max_scale', 2.), ('growth_interval', 'often')))
def test_a_rule_that_cannot_work(name, value): refused(lambda: A.make_scaler('dynamic', init_scale=2.**8, **{name: value}), value)


@pytest.mark.parametrize('kw, value', ((dict(hysteresis=0), 0), (dict(hysteresis=1.5), 1.5), (dict(refill='never'), 'never')))
def test_patience_that_cannot_be(kw, value): refused(lambda: A.make_scaler('hysteresis', **kw), value)


@pytest.mark.parametrize('kw, value', ((dict(edge=-1.), -1.), (dict(threshold=2.), 2.), (dict(factor=.5), .5), (dict(period=0), 0)))
def test_bins_that_cannot_be(kw, value): refused(lambda: A.make_scaler('als', **kw), value)


@pytest.mark.parametrize('policy, names', (('logmax', ('beta1', 'beta2', 'deviations', 'overflow_as', 'init_scale', 'min_scale', 'max_scale')),
                                           ('dynamic', ('growth_factor', 'backoff_factor', 'growth_interval', 'hysteresis')),
                                           ('fairseq', ('tolerance', 'growth_interval')), ('als', ('edge', 'threshold', 'factor', 'period'))))
@pytest.mark.parametrize('value', (nan, inf, 10**400))
def test_a_number_that_no_float_holds(policy, names, value):
    for name in names: refused(lambda: A.make_scaler(policy, **{name: value}), value)


def test_a_policy_that_there_is_not(): refused(lambda: A.make_scaler('telepathy'), 'telepathy')


@pytest.mark.parametrize('value', (1024., 'dynamic scaler', None, nn.Linear))
def test_a_step_wants_a_policy(value): refused(lambda: A.make_step(value), value)


def learner(scaler, model=None, **kw):
    v, y = torch.randn(16, 4), torch.zeros(16, dtype=torch.int64)
    return A.make_learner(model or nn.Linear(4, 2), (v, y), (v, y), scaler, loss_func=F.cross_entropy, **kw)


@pytest.mark.parametrize('scaler, dtype, value', ((True, 'fp8', 'fp8'), (False, 'fp16', ''), (True, 'bf16', ''), (True, torch.float64, torch.float64)))
def test_a_scheme_that_cannot_be(scaler, dtype, value):
    refused(lambda: learner(A.make_scaler('dynamic') if scaler else None, dtype=dtype), value)
@pytest.mark.parametrize('value', (1024., 'dynamic'))
def test_a_learner_wants_a_policy(value): refused(lambda: learner(value), value)
@pytest.mark.parametrize('every', (0, -1, 2.5, 'often'))
def test_a_checkpoint_each_so_many_steps(every, tmp_path): refused(lambda: A.checkpoint(tmp_path/'x', every), every)


@pytest.mark.parametrize('value', (2.**16, 'telepathy'))
def test_a_gradscaler_wants_a_policy(value): refused(lambda: A.make_gradscaler(value), value)
@pytest.mark.parametrize('kw, value', ((dict(init_scale=nan), nan), (dict(growth_interval=0), 0), (dict(init_scale=-1.), -1.)))
def test_a_gradscalers_rule(kw, value): refused(lambda: A.make_gradscaler(device='cpu', **kw), value)
def test_numbers_beside_a_policy_are_not_lost():
    refused(lambda: A.make_gradscaler(A.make_scaler('megatron'), init_scale=4.), 'init_scale')


def test_a_loss_is_one_number():
    m = nn.Linear(4, 2)
    step = A.make_step(A.make_scaler('static'))
    refused(lambda: step(m, torch.ones(3, 4), None, torch.optim.SGD(m.parameters(), lr=1.), lambda out, y: out), (3, 2))


def test_sparse_gradients_are_named():
    m = nn.Sequential(nn.Embedding(4, 3, sparse=True))
    step = A.make_step(A.make_scaler('static'))
    refused(lambda: step(m, torch.arange(4), None, torch.optim.SGD(m.parameters(), lr=1.), lambda out, y: out.sum()), '0')


@pytest.mark.parametrize('policy', ('dynamic', 'megatron', 'logmax', 'als'))
@pytest.mark.parametrize('spoil', ('other policy', 'incomplete', 'nan', 'no state', 'wide'))
def test_a_state_that_cannot_be_loaded_changes_nothing(policy, spoil):
    s = A.make_scaler(policy, init_scale=2.**9); state, value = s.state_dict(), ''
    if spoil == 'other policy': state = A.make_scaler('metaseq').state_dict()
    if spoil == 'incomplete': value = 'scale'; del state['scale']
    if spoil == 'nan': state['scale'] = torch.tensor(nan); value = 'nan'
    if spoil == 'no state': state, value = 17, 'int'
    if spoil == 'wide': state['scale'] = torch.ones(2)
    refused(lambda: s.load_state_dict(state), value)
    assert A.scale_of(s) == 2.**9


@pytest.mark.parametrize('dtype', ('nf7', torch.int8, torch.float32))
def test_half_is_a_dtype(dtype): refused(lambda: A.convert('half', nn.Linear(2, 2), dtype), dtype)
def test_a_constraint_that_there_is_not(): refused(lambda: A.convert('unit', nn.Linear(2, 2), constraint='loose'), 'loose')
def test_a_readout_that_there_is_not(): refused(lambda: A.convert('unit', nn.Sequential(nn.Linear(2, 2)), readout='7'), '7')
def test_a_recipe_that_there_is_not(): refused(lambda: A.convert('fp8', nn.Linear(2, 2), 'hourly'), 'hourly')
def test_a_skip_that_matches_nothing(): refused(lambda: A.convert('fp8', nn.Linear(2, 2), 'current', keep='heads'), 'heads')
def test_a_format_that_there_is_not(): refused(lambda: A.convert('quantize', torch.ones(2), 'e99m1'), 99)
@pytest.mark.parametrize('rounding', ('upwards', 3))
def test_a_rounding_that_there_is_not(rounding): refused(lambda: A.convert('quantize', torch.ones(2), 'e4m3', rounding=rounding), rounding)
def test_masters_of_nothing():
    with pytest.raises(ValueError): A.convert('masters', [[]])


def test_a_step_refuses_a_half_model():
    m = nn.Sequential(nn.Linear(4, 2)).half()
    step = A.make_step(A.make_scaler('static', init_scale=4.))
    refused(lambda: step(m, torch.ones(3, 4).half(), torch.zeros(3, dtype=torch.int64), torch.optim.SGD(m.parameters(), lr=1e-4), F.cross_entropy), torch.float16)


def test_a_learner_refuses_a_half_model():
    def go():
        learn = learner(A.make_scaler('static', init_scale=4.), nn.Sequential(nn.Linear(4, 2)).half(), bs=4)
        with learn.no_logging(): learn.fit(1)
    refused(go, torch.float16)
