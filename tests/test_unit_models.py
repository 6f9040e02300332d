"""Layers that are torch's but for their ops, a conversion that refuses what it does not know, blocks and models of unit scale."""
import copy, io

import pytest, torch, torch.nn as nn, torch.nn.functional as F

import mpcourse.toys as toys, mpcourse.unit as U
from mpcourse.tensorcore import fp32_accumulate
from mpcourse.formats import same_bits
from mpcourse.half import cast_policy, is_norm
from mpcourse.toys import TOYS, char_transformer, deep_sigmoid, relu_mlp
from mpcourse.zoo import cnn, study, two_towers
from mpcourse.unit import assert_true_directions, unit_cross_entropy
from mpcourse.unit_models import (UNIT_LAYERS, UnitAttention, UnitLayer, UnitLinear, UnitReadout, UnitResidual, not_convertible, unit_ffn, unit_layer,
                                  unit_param_groups, unit_scale, unit_transformer_layer)

sweep = study('unit_sweep').module
CharModel, KINDS_OF_MODEL, UnitRNN = sweep.CharModel, sweep.KINDS_OF_MODEL, sweep.UnitRNN
pytestmark = pytest.mark.library


@pytest.fixture(autouse=True)
def seed():
    with torch.random.fork_rng(): torch.manual_seed(0); yield


def r(*shape): return torch.randn(shape)


MAKE = {nn.Linear: ((64, 96), (128, 64)), nn.Conv1d: ((16, 32, 3), (8, 16, 20)), nn.Conv2d: ((16, 32, 3), (8, 16, 9, 9)), nn.Embedding: ((20, 16), None),
        nn.LayerNorm: ((64,), (32, 64)), nn.RMSNorm: ((64,), (32, 64)), nn.GroupNorm: ((4, 16), (8, 16, 5)), nn.BatchNorm1d: ((16,), (64, 16)),
        nn.BatchNorm2d: ((16,), (8, 16, 5, 5)), nn.ReLU: ((), (8, 64)), nn.GELU: ((), (8, 64)), nn.SiLU: ((), (8, 64)), nn.Tanh: ((), (8, 64)),
        nn.Sigmoid: ((), (8, 64)), nn.Softmax: ((-1,), (8, 64)), nn.Dropout: ((.2,), (8, 64)), nn.AvgPool1d: ((2,), (8, 16, 20)), nn.AvgPool2d: ((2,), (8, 16, 8, 8)),
        nn.AdaptiveAvgPool2d: ((1,), (8, 16, 8, 6))}
LAYERS = pytest.mark.parametrize('cls', MAKE, ids=lambda c: c.__name__)


def both(cls):
    "A layer, its unit-scaled sister with the same parameters, and an input, in float64"
    args, shape = MAKE[cls]
    a, b = cls(*args).double(), UNIT_LAYERS[cls](*args).double()
    a.load_state_dict(b.state_dict())
    return a, b, torch.randint(20, (40,)) if shape is None else r(*shape).double().requires_grad_()


@LAYERS
def test_a_layer_is_torchs_times_factors(cls):
    a, b, x = both(cls)
    assert isinstance(b, cls) and list(a.state_dict()) == list(b.state_dict())
    def run(m):
        with torch.random.fork_rng():
            torch.manual_seed(1)
            y = m(x)
        ts = [*m.parameters()] + ([x] if x.is_floating_point() else [])
        return y, *torch.autograd.grad(y, ts, torch.ones_like(y).flatten().cumsum(0).view_as(y))
    for u, v in zip(run(a), run(b)):
        k = ((u*v).sum()/(u*u).sum()).item()
        if not (u.dim() == 1 and cls in (nn.Linear, nn.Conv1d, nn.Conv2d)): torch.testing.assert_close(v, u*k, rtol=1e-9, atol=1e-9)


ONE = dict(none=max, to_output=lambda y, x: y, geometric=lambda y, x: (y*x)**.5, harmonic=lambda y, x: (y + x)/2, arithmetic=lambda y, x: 2/(1/y + 1/x))


@LAYERS
@pytest.mark.parametrize('constraint', U.CONSTRAINTS)
def test_it_is_of_unit_scale_as_far_as_its_constraint_lets_it(cls, constraint):
    "One factor in place of two leaves that mean of the two sizes at one which gives the factor its name"
    args, shape = MAKE[cls]
    layer = UNIT_LAYERS[cls](*args)
    layer.constraint = constraint
    if shape is None:
        ids = torch.randint(20, (4000,))
        g, = torch.autograd.grad(layer(ids).sum(), layer.weight)
        assert same_bits(layer(ids), layer.weight[ids])
        torch.testing.assert_close(g, (torch.bincount(ids)*(20/4000)**.5)[:, None].expand_as(g), rtol=1e-5, atol=0)
        return
    stds = U.unit_stds(layer, x=r(32*shape[0], *shape[1:]))
    assert abs(ONE[constraint](stds['y'], stds['x']) - 1) < .05, stds
    if constraint == 'none': assert abs(min(stds['y'], stds['x']) - 1) < .05


@LAYERS
def test_it_starts_at_one(cls):
    _, b, _ = both(cls)
    for n, p in b.named_parameters():
        if is_norm(b): assert (p == (1 if n == 'weight' else 0)).all()
        elif n == 'bias': assert (p == 0).all()
        else: assert abs(p.std() - 1) < .1 and abs(p.mean()) < .2


def test_every_listed_layer_is_tried_here():
    assert set(MAKE) | {nn.CrossEntropyLoss, nn.MSELoss} == set(UNIT_LAYERS)


def test_losses():
    z, y = r(32, 10), torch.randint(10, (32,))
    y[::3] = -1
    kw = dict(ignore_index=-1, label_smoothing=.1)
    torch.testing.assert_close(UNIT_LAYERS[nn.CrossEntropyLoss](**kw)(z, y), nn.CrossEntropyLoss(**kw)(z, y))
    torch.testing.assert_close(UNIT_LAYERS[nn.MSELoss]()(z, z + 1), torch.tensor(1.))


@pytest.mark.parametrize('shape', [(10,), (32, 10), (4, 10, 7), (4, 10, 3, 5), (10, 10, 10)], ids=str)
def test_the_loss_layer_keeps_torchs_layout(shape):
    z, y = r(*shape).requires_grad_(), torch.randint(10, shape[:1] + shape[2:] if len(shape) > 1 else ())
    for kw in (dict(), dict(label_smoothing=.1, ignore_index=3)):
        ours, plain = UNIT_LAYERS[nn.CrossEntropyLoss](**kw)(z, y), nn.CrossEntropyLoss(**kw)(z, y)
        torch.testing.assert_close(ours, plain)
        a, b = [torch.autograd.grad(loss, z)[0].flatten() for loss in (ours, plain)]
        assert F.cosine_similarity(a, b, 0) > 1 - 1e-6
    assert type(unit_scale(nn.CrossEntropyLoss())) is UNIT_LAYERS[nn.CrossEntropyLoss]


def test_the_loss_layer_refuses_classes_at_the_end():
    loss = UNIT_LAYERS[nn.CrossEntropyLoss]()
    for z, y in ((r(4, 7, 10), torch.zeros(4, 7, dtype=torch.int64)), (r(4, 10), r(4, 10)), (r(4, 10), r(4))):
        with pytest.raises(ValueError, match='it got'): loss(z, y)


def test_a_mean_over_the_image_or_none():
    x = r(256, 64, 8, 8)
    assert abs(unit_scale(nn.AdaptiveAvgPool2d(1), constraint='none')(x).std() - 1) < .05
    for size in (3, (1, 2)):
        with pytest.raises(ValueError, match='output_size'): unit_scale(nn.AdaptiveAvgPool2d(size))


@pytest.mark.parametrize('kw', [dict(), dict(momentum=None), dict(track_running_stats=False), dict(affine=False)], ids=str)
def test_batch_norm_as_torch_keeps_it(kw):
    a, b = nn.BatchNorm2d(8, **kw), UNIT_LAYERS[nn.BatchNorm2d](8, **kw)
    for i in range(3):
        x = r(4, 8, 3, 3)*2 + 1
        torch.testing.assert_close(a(x), b(x))
    assert all(torch.allclose(p, q) for p, q in zip(a.state_dict().values(), b.state_dict().values()))
    torch.testing.assert_close(a.eval()(x), b.eval()(x))
    with pytest.raises(ValueError, match='4D'): b(r(4, 8))


# --- the conversion ---

@pytest.mark.parametrize('make', [relu_mlp, deep_sigmoid, cnn])
def test_converts_the_toys_that_are_chains(make):
    model = make()
    before = copy.deepcopy(model.state_dict())
    last = str(len(model) - 1)
    ours = unit_scale(model, readout=last, constraint='none')
    assert all(same_bits(p, before[n]) for n, p in model.state_dict().items()), 'the model was changed'
    assert list(ours.state_dict()) == list(before) and isinstance(ours[int(last)], UnitReadout)
    for n, p in ours.named_parameters(): assert abs(p.std() - 1) < 1e-4 if p.dim() > 1 else True
    x, y = torch.rand(256, 1, 8, 8), torch.randint(10, (256,))
    assert_true_directions(ours, x, loss_func=lambda z: unit_cross_entropy(z, y))
    assert .3 < ours((x - .5)*12**.5).std() < 4


def test_weights_keep_their_directions():
    a = nn.Linear(32, 32)
    ours = unit_scale(nn.Sequential(a, nn.Tanh()))
    assert abs(ours[0].weight.std() - 1) < 1e-5
    torch.testing.assert_close(ours[0].weight/ours[0].weight[0, 0], a.weight/a.weight[0, 0])


def tied():
    "An embedding that is the readout, too"
    m = nn.Sequential(nn.Embedding(20, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 20, bias=False))
    m[4].weight = m[0].weight
    return m


def used_twice():
    lin = nn.Linear(16, 16)
    return nn.Sequential(lin, nn.Tanh(), nn.Sequential(lin))


@pytest.mark.parametrize('make,names', [(tied, ('0.weight', '4.weight')), (used_twice, ('0.weight', '2.0.weight'))])
def test_a_weight_in_two_places_is_refused(make, names):
    "Its edges are no cut edges: converted all the same, its gradient points elsewhere"
    model = make()
    before, kinds = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=names[0]) as e: unit_scale(model, constraint='none')
    assert names[1] in str(e.value)
    assert kinds == [type(m) for m in model.modules()] and all(same_bits(p, before[n]) for n, p in model.state_dict().items())


def test_why_a_weight_in_two_places_is_refused():
    emb, lin, head = UNIT_LAYERS[nn.Embedding](20, 16), UnitLinear(16, 16), UnitReadout(16, 20, bias=False)
    lin.constraint, head.weight = 'none', emb.weight
    with pytest.raises(AssertionError, match='point elsewhere'): assert_true_directions(nn.Sequential(emb, lin, U_Tanh(), head), torch.randint(20, (64,)))


def U_Tanh():
    t = UNIT_LAYERS[nn.Tanh]()
    t.constraint = 'none'
    return t


def test_a_layer_without_weights_may_be_used_twice():
    act = nn.Tanh()
    ours = unit_scale(nn.Sequential(nn.Linear(8, 8), act, nn.Linear(8, 8), act))
    assert ours[1] is ours[3] and type(ours[1]) is UNIT_LAYERS[nn.Tanh]


def test_the_root_may_be_a_container_or_a_layer():
    "The peer leaves a root container's graph as it was, and draws new weights"
    x, w = r(512, 256), nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
    assert .7 < unit_scale(w)(x).std() < 1.3 and .9 < unit_scale(nn.Linear(256, 256))(x).std() < 1.1
    nested = nn.ModuleDict(dict(a=nn.ModuleList([nn.Linear(4, 4)])))
    assert type(unit_scale(nested)['a'][0]) is UnitLinear


class Own(nn.Module):
    def __init__(self): super().__init__(); self.lin = nn.Linear(4, 4)
    def forward(self, x): return x + self.lin(x)


class MyLinear(nn.Linear):
    def forward(self, x): return super().forward(x)*2


@pytest.mark.parametrize('model,match', [
    (nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Flatten(), nn.MaxPool2d(2))), r"'1\.1': .*MaxPool2d"), (nn.Sequential(Own()), "'0': .*Own"),
    (nn.PReLU(), "'the model itself': .*PReLU"), (nn.Sequential(MyLinear(4, 4)), 'MyLinear'), (nn.LSTM(4, 4), 'LSTM'),
    (nn.Sequential(nn.TransformerEncoderLayer(8, 2)), 'TransformerEncoderLayer'), (char_transformer(), 'CharTransformer'), (two_towers(), 'TwoTowers'),
    (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), 'Parametrized'), (nn.Sequential(nn.GELU('tanh')), "'0': .*'approximate': 'tanh'"),
    (nn.Embedding(4, 4, padding_idx=0), "'padding_idx': 0"), (nn.Conv2d(3, 3, 3, padding=1, padding_mode='reflect'), "'padding_mode': 'reflect'"),
    (nn.CrossEntropyLoss(reduction='sum'), "'reduction': 'sum'"), (nn.AvgPool2d(2, ceil_mode=True), "'ceil_mode': True"),
    (nn.Sequential(nn.InstanceNorm2d(3)), 'InstanceNorm2d')], ids=lambda v: v if isinstance(v, str) else '')
def test_refuses_what_it_does_not_know_and_names_it(model, match):
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=match) as e: unit_scale(model)
    assert ':' in str(e.value) and all(same_bits(p, before[n]) for n, p in model.state_dict().items())


def test_everything_in_the_way_is_named_at_once():
    model = nn.Sequential(nn.PReLU(), nn.Linear(4, 4), nn.LSTM(4, 4), nn.GELU('tanh'), nn.Linear(4, 4))
    with torch.no_grad(): model[4].weight.fill_(float('nan'))
    assert set(not_convertible(model)) == {'0', '2', '3', '4.weight'} and not_convertible(relu_mlp()) == {}
    with pytest.raises(ValueError) as e: unit_scale(model)
    assert all(f"'{n}': " in str(e.value) for n in not_convertible(model))


def constant(w): w.fill_(.1)
def shifted(w): w.normal_(.5, .4)
def with_nan(w): w[0, 0] = float('nan')
def with_inf(w): w[-1, -1] = float('-inf')


@pytest.mark.parametrize('spoil,says', [(constant, r'its mean is 0\.1'), (shifted, r'its mean is 0\.\d+'), (with_nan, 'it is not finite'), (with_inf, 'it is not finite')])
@pytest.mark.parametrize('make', [lambda: nn.Linear(16, 16), lambda: nn.Linear(2, 1, bias=False), lambda: nn.Embedding(8, 16)], ids=['linear', 'two', 'table'])
def test_weights_that_do_not_lie_around_zero_are_refused(make, spoil, says):
    model = nn.Sequential(nn.Linear(4, 4), nn.ModuleList([make()]))
    with torch.no_grad(): spoil(model[1][0].weight)
    if spoil is shifted and model[1][0].weight.numel() == 2:      # two numbers tell nothing
        unit_scale(model)
        return
    before, kinds = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=r"'1\.0\.weight': '" + says): unit_scale(model)
    assert kinds == [type(m) for m in model.modules()] and all(same_bits(p, before[n]) for n, p in model.state_dict().items())


@pytest.mark.parametrize('dtype', [torch.float32, torch.float16], ids=str)
def test_zero_weights_stay_zero_and_fresh_ones_of_any_size_are_taken(dtype):
    zero = nn.Linear(16, 16).to(dtype)
    with torch.no_grad(): zero.weight.zero_()
    assert (unit_scale(zero).weight == 0).all()
    for seed in range(20):
        with toys.seeded(seed): layers = [nn.Linear(1, 2), nn.Linear(2, 1), nn.Linear(3, 3), nn.Linear(1, 1), nn.Linear(6, 6), nn.Conv2d(1, 4, 3)]
        unit_scale(nn.Sequential(*layers).to(dtype))
    with pytest.raises(ValueError, match='weight.*not finite'):
        norm = nn.LayerNorm(4)
        with torch.no_grad(): norm.weight[0] = float('nan')
        unit_scale(norm)


def pruned(what):
    import torch.nn.utils.prune as prune
    return lambda: prune.l1_unstructured(nn.Linear(4, 4), what, .5)


@pytest.mark.parametrize('make,held', [(lambda: nn.utils.spectral_norm(nn.Linear(4, 4)), 'weight'), (lambda: nn.utils.weight_norm(nn.Conv1d(4, 4, 1)), 'weight'),
                                       (pruned('weight'), 'weight'), (pruned('bias'), 'bias')], ids=['spectral', 'weight norm', 'pruned', 'bias pruned'])
@pytest.mark.filterwarnings('ignore')
def test_weights_that_are_computed_are_refused(make, held):
    layer = make()
    for model, name in ((layer, 'the model itself'), (nn.Sequential(nn.Tanh(), layer), '1'), (nn.Sequential(UnitResidual(layer)), '0.f')):
        with pytest.raises(ValueError, match=f"'{name}': 'its {held} is not a parameter"): unit_scale(model)
        assert type(layer) in (nn.Linear, nn.Conv1d)


def test_in_place_layers_are_converted_out_of_place():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.SiLU(inplace=True), nn.Dropout(.1, inplace=True), nn.Linear(8, 2))
    ours = unit_scale(model, readout='5')
    assert not any(getattr(m, 'inplace', False) for m in ours.modules()) and sum(getattr(m, 'inplace', False) for m in model.modules()) == 3
    assert_true_directions(ours, r(16, 8))
    with pytest.raises(ValueError, match='inplace'): UNIT_LAYERS[nn.ReLU](inplace=True)


def test_a_bias_before_batch_norm_is_no_false_alarm():
    "Its true gradient is zero, and what is left of it is rounding"
    for make in (lambda: nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)), lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten())):
        ours = unit_scale(make())
        x = r(64, 16) if isinstance(ours[0], nn.Linear) else r(8, 3, 5, 5)
        assert_true_directions(ours, x)
        assert U.gradient_cosines(ours, x)['0.bias'] == 1


@pytest.mark.parametrize('k', [4, 16])
def test_micro_batches_add_up_to_less(k):
    model, ids = CharModel(context=32), torch.randint(96, (16, 32))
    def grads(ids): return torch.autograd.grad(unit_cross_entropy(model(ids), ids), list(model.parameters()))
    parts = [sum(gs)/k for gs in zip(*map(grads, ids.chunk(k)))]
    for full, part in zip(grads(ids), parts): torch.testing.assert_close(part, full*k**-.5, rtol=1e-3, atol=1e-4)


def test_other_bad_input():
    with pytest.raises(ValueError, match="no constraint 'gmean'"): unit_scale(nn.Linear(4, 4), constraint='gmean')
    with pytest.raises(ValueError, match="no linear layer 'head'"): unit_scale(nn.Sequential(nn.Linear(4, 4)), readout='head')
    with pytest.raises(ValueError, match='tau=1'): UnitResidual(nn.Identity(), tau=1)(r(2, 4))
    with pytest.raises(RuntimeError, match='3'): UnitAttention(64, 3)(r(2, 4, 64))
    with pytest.raises(ValueError, match="'approximate': 'tanh'"): UNIT_LAYERS[nn.GELU]('tanh')


def test_a_refused_conversion_is_not_half_done():
    "Unknown ops in a layer's own code are behind a class that is not known, and all else stays as it was"
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), Own(), nn.Linear(4, 4))
    before, kinds = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    for kw, match in ((dict(), "'2': .*Own"), (dict(readout='1'), "'2': .*Own"), (dict(known={Own: UnitLinear}, readout='1'), "no linear layer '1'"),
                      (dict(known={Own: UnitLinear}, constraint='max'), "no constraint 'max'")):
        with pytest.raises(ValueError, match=match): unit_scale(model, **kw)
        assert [type(m) for m in model.modules()] == kinds and all(same_bits(p, before[n]) for n, p in model.state_dict().items())


@pytest.mark.parametrize('kw', [dict(), dict(momentum=None)], ids=str)
def test_batch_norm_counts_no_batch_that_it_refuses(kw):
    bn = UNIT_LAYERS[nn.BatchNorm2d](4, **kw)
    for bad in (r(0, 4, 3, 3), torch.ones(2, 4, 3, 3, dtype=torch.int64)):
        with pytest.raises((ValueError, RuntimeError)): bn(bad)
    assert bn.num_batches_tracked == 0 and (bn.running_mean == 0).all()
    bn(r(2, 4, 3, 3))
    assert bn.num_batches_tracked == 1


def test_a_class_of_your_own():
    class UnitOwn(UnitLayer, Own):
        def forward(self, x): return U.weighted_add(x, self.lin(x))
    ours = unit_scale(nn.Sequential(Own(), nn.GELU()), known={Own: UnitOwn})
    assert type(ours[0]) is UnitOwn and type(ours[0].lin) is UnitLinear
    assert_true_directions(ours, r(8, 4))


def test_the_readout_has_no_constraint_whatever_the_others_have():
    ours = unit_scale(relu_mlp(), readout='7')
    assert ours[7].constraint == 'none' and ours[5].constraint == 'geometric'


def test_our_own_blocks_may_stay_among_torchs_layers():
    ours = unit_scale(nn.Sequential(nn.Linear(8, 16), unit_transformer_layer(16), UnitRNN(16, 16), nn.Tanh()))
    assert type(ours[0]) is UnitLinear and type(ours[1][0].f) is UnitAttention
    with pytest.raises(ValueError, match='CharModel'): unit_scale(CharModel(unit=False))


def test_converting_twice_changes_nothing():
    once = unit_scale(relu_mlp(), readout='7')
    twice = unit_scale(once)
    assert all(same_bits(p, q) for p, q in zip(once.parameters(), twice.parameters()))


# --- blocks and models ---

def conv_block(c):
    "Two convolutions with BatchNorm, as a residual branch"
    conv, norm = (lambda: UNIT_LAYERS[nn.Conv2d](c, c, 3, padding='same', bias=False)), UNIT_LAYERS[nn.BatchNorm2d]
    return UnitResidual(nn.Sequential(conv(), norm(c), UNIT_LAYERS[nn.ReLU](), conv(), norm(c)))


BLOCKS = {'ffn': (lambda: unit_ffn(64), (256, 64)), 'attention': (lambda: UnitAttention(64), (16, 32, 64)), 'full attention': (lambda: UnitAttention(64, is_causal=False), (16, 32, 64)),
          'pre': (lambda: unit_transformer_layer(64), (16, 32, 64)), 'post': (lambda: unit_transformer_layer(64, post=True), (16, 32, 64)),
          'conv': (lambda: conv_block(32), (16, 32, 8, 8)), 'rnn': (lambda: UnitRNN(32, 64), (32, 24, 32))}


@pytest.mark.parametrize('name', BLOCKS)
def test_blocks_are_near_one_and_true(name):
    make, shape = BLOCKS[name]
    block, x = make(), r(*shape)
    stds = U.unit_stds(block, x=x)
    assert all(.6 < v < 1.6 for v in stds.values()), stds
    y = block(x)
    y.backward(torch.randn_like(y))
    for n, p in block.named_parameters():
        if p.dim() > 1: assert .5 < p.grad.std() < 1.9, (n, p.grad.std())
    assert_true_directions(block, x)


def test_without_the_root_of_the_steps_a_recurrent_gradient_grows():
    x = r(32, 64, 32)
    def size(f):
        rnn = UnitRNN(32, 64)
        y = f(rnn)(x)
        y.backward(torch.randn_like(y))
        return rnn.u.grad.std().item()
    def plain(rnn):
        def run(x):
            h, out = None, []
            for xt in U.unit_linear(x, rnn.w, rnn.b).unbind(1):
                h = U.unit_tanh(xt if h is None else U.weighted_add(xt, U.unit_linear(h, rnn.u)))
                out.append(h)
            return torch.stack(out, 1)
        return run
    assert size(lambda m: m) < 1.5 and size(plain) > 5


@pytest.mark.parametrize('kind', KINDS_OF_MODEL)
def test_character_models(kind):
    ids = torch.randint(96, (8, 32))
    ours, plain = CharModel(kind, context=32), CharModel(kind, unit=False, context=32)
    def count(m): return sum(p.numel() for p in m.parameters())
    assert abs(count(ours)/count(plain) - 1) < .02
    assert_true_directions(ours, ids, loss_func=lambda z: unit_cross_entropy(z, ids))
    assert .7 < ours(ids).std() < 1.4
    for p in ours.parameters(): assert p.dim() < 2 or abs(p.std() - 1) < .1
    assert not any('Unit' in type(m).__name__ and isinstance(m, UnitLayer) for m in plain.modules())


def test_the_recurrent_net_by_hand():
    "Its states, and its gradients: those of autograd times one over the root of what each sum runs over, steps among it"
    rnn, x, n, t, tanh = UnitRNN(8, 16, share=.3).double(), r(4, 24, 8).double(), 4, 24, U.ELEMENTWISE[torch.tanh]
    h, states = None, []
    for xt in (F.linear(x, rnn.w)/128**.25 + rnn.b).unbind(1):
        h = torch.tanh(xt if h is None else .3**.5*xt + .7**.5*F.linear(h, rnn.u)/4)*(tanh['y']*tanh['x'])**.5
        states.append(h)
    plain, ours, ps = torch.stack(states, 1), rnn(x), [rnn.w, rnn.u, rnn.b]
    torch.testing.assert_close(ours, plain)
    up = torch.randn_like(plain)
    want = 128**.25*(n*t)**-.5, 4*n**-.5*t**-.5, (n*t)**-.5
    for a, b, k in zip(torch.autograd.grad(ours, ps, up), torch.autograd.grad(plain, ps, up), want): torch.testing.assert_close(a, b*k)


@pytest.mark.parametrize('kind', KINDS_OF_MODEL)
def test_places_have_the_gradient_of_symbols_summed_over_the_root_of_the_batch(kind):
    "Each symbol stands in one place of one window, so that its row's gradient is that of the place"
    model, ids = CharModel(kind, context=32), torch.randperm(96).view(3, 32)
    model.body.register_forward_pre_hook(lambda m, args: torch.testing.assert_close(args[0], (model.tok.weight[ids] + model.pos.weight)/2**.5))
    unit_cross_entropy(model(ids), ids).backward()
    torch.testing.assert_close(model.pos.weight.grad, model.tok.weight.grad[ids].sum(0)*3**-.5)


@pytest.mark.parametrize('constraint', U.CONSTRAINTS)
def test_attention_by_hand(constraint):
    x, m = r(2, 8, 16), UnitAttention(16, 2, context=8)
    m.constraint = m.qkv.constraint = m.out.constraint = constraint
    q, k, v = (t.view(2, 8, 2, 8).transpose(1, 2) for t in U.unit_linear(x, m.qkv.weight, m.qkv.bias, constraint).chunk(3, -1))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)*U.constrain(U.attention_factors(8, 8, True), constraint)['y']
    torch.testing.assert_close(m(x), U.unit_linear(y.transpose(1, 2).reshape(2, 8, 16), m.out.weight, m.out.bias, constraint))


@pytest.mark.parametrize('kind', KINDS_OF_MODEL)
def test_in_half_no_weight_gradient_is_lost(kind):
    ids = torch.randint(96, (16, 32))
    def lost(model, loss_func):
        leaves = {n: p.detach().half().requires_grad_() for n, p in model.named_parameters()}
        with fp32_accumulate(): loss = loss_func(torch.func.functional_call(model, leaves, (ids,)).float().flatten(0, -2), ids.flatten())
        with fp32_accumulate(): (loss*2.**-16).backward()   # as in a mean over very many such batches
        return max((p.grad == 0).float().mean().item() for n, p in leaves.items() if p.dim() > 1 and 'pos' not in n and 'tok' not in n)
    assert lost(CharModel(kind, context=32), unit_cross_entropy) < .05
    assert lost(CharModel(kind, unit=False, context=32), F.cross_entropy) > .3


def test_saved_copied_and_exported():
    model, ids = CharModel(context=16), torch.randint(96, (2, 16))
    buf = io.BytesIO()
    torch.save(model.state_dict(), buf)
    buf.seek(0)
    other = CharModel(context=16)
    other.load_state_dict(torch.load(buf))
    torch.testing.assert_close(other(ids), model(ids))
    with torch.inference_mode(): torch.testing.assert_close(model.eval()(ids), other(ids))
    with torch.no_grad(): torch.testing.assert_close(torch.export.export(model, (ids,)).module()(ids), model(ids))
    assert set(cast_policy(model).values()) == {torch.float16, torch.float32} and is_norm(model.ln)


def test_shorter_windows_see_the_same_function():
    model, ids = CharModel(context=32).eval(), torch.randint(96, (2, 32))
    torch.testing.assert_close(model(ids[:, :9]), model(ids)[:, :9])


def test_causal_convolution_sees_the_past_only():
    for unit in (False, True):
        model, ids = CharModel('convolution', unit, context=32).eval(), torch.randint(96, (2, 32))
        later = ids.clone()
        later[:, 20:] = (later[:, 20:] + 1) % 96
        torch.testing.assert_close(model(later)[:, :20], model(ids)[:, :20])
        assert not torch.allclose(model(later)[:, 20], model(ids)[:, 20])


@pytest.mark.parametrize('name', TOYS)
def test_every_toy_is_converted_or_named(name):
    model = toys.get_toy(name).model()
    if name in ('char_lm', 'two_towers'):
        with pytest.raises(ValueError, match=f"'the model itself': .*{type(model).__name__}"): unit_scale(model)
    else: unit_scale(model)


# --- rates ---

def rates(model, lr, **kw):
    names = {p: n for n, p in model.named_parameters()}
    found = {names[p]: g['lr'] for g in unit_param_groups(model, lr, **kw) for p in g['params']}
    assert found.keys() == dict(model.named_parameters()).keys()
    return found


def test_rates_by_hand():
    layers = UNIT_LAYERS
    model = nn.Sequential(layers[nn.Embedding](20, 16), layers[nn.LayerNorm](16), UnitLinear(16, 64), layers[nn.Conv2d](8, 4, (3, 5), groups=2), UnitReadout(64, 20))
    model[4].power = 1.
    want = {'0.weight': .5, '1.weight': .5/32, '1.bias': .5/32, '2.weight': .5/4, '2.bias': .5/32, '3.weight': .5*60**-.5, '3.bias': .5/32, '4.weight': .5, '4.bias': .5/32}
    assert rates(model, .5) == pytest.approx(want) and rates(model, .5, vectors=1.)['2.bias'] == .5
    assert rates(nn.Sequential(nn.Linear(64, 8, bias=False), nn.Conv1d(8, 4, 2, bias=False)), .5) == pytest.approx({'0.weight': .5/64, '1.weight': .5/16})


@pytest.mark.parametrize('unit', [False, True])
def test_under_its_rate_a_step_moves_the_output_as_far_at_every_width(unit):
    def moved(d):
        layer, x, up = (UnitLinear if unit else nn.Linear)(d, 64, bias=False), torch.ones(1, d), r(1, 64)
        opt, before = torch.optim.Adam(unit_param_groups(layer, .1)), layer(x).detach()
        layer(x).backward(up)
        opt.step()
        return (layer(x) - before).abs().mean().item()*(64**.25 if unit else 1)*(d**-.25 if unit else 1)
    a, b, c = map(moved, (16, 64, 1024))
    assert a == pytest.approx(b, rel=1e-2) and b == pytest.approx(c, rel=1e-2)


@pytest.mark.parametrize('kind', KINDS_OF_MODEL)
def test_groups_hold_each_parameter_once_and_train(kind):
    model, ids = CharModel(kind, context=32), torch.randint(96, (4, 32))
    opt, first = torch.optim.Adam(unit_param_groups(model, .1)), None
    for _ in range(4):
        loss = unit_cross_entropy(model(ids), ids)
        opt.zero_grad()
        loss.backward()
        opt.step()
        first = first or loss.item()
    assert sum(len(g['params']) for g in opt.param_groups) == len(list(model.parameters())) and loss < first


def test_a_layer_of_your_own_in_the_table():
    class Shift(nn.Module):
        slope = 1
        def forward(self, x): return F.softplus(x)
    try:
        ours = unit_layer(Shift, lambda m, x: U.unit_elementwise(F.softplus, x, m.constraint), slope=1)
        assert type(unit_scale(nn.Sequential(Shift()))[0]) is ours and ours.__name__ == 'UnitShift' and abs(ours()(r(9999)).std() - 1) < .2
    finally: del UNIT_LAYERS[Shift]
    assert list(not_convertible(nn.Sequential(Shift()))) == ['0']
