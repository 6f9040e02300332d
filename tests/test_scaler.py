"The protocol of loss scalers: a contract over policies, and its holes one by one"
import copy, pickle, re, warnings
from collections import OrderedDict, namedtuple
from functools import partial

import pytest, torch, torch.nn as nn, torch.nn.functional as F
from conftest import ROOT
from torch.utils._python_dispatch import TorchDispatchMode

import mpcourse.zoo  # noqa: F401
from mpcourse.als import ALSScaler
from mpcourse.formats import same_bits
from mpcourse.layerwise import LayerwiseScaler
from mpcourse.policies import POLICIES, get_policy
from mpcourse.scaler import LossScaler, StaticScaler, reduce_stats, validate_scale
from mpcourse.toys import batches, get_toy

pytestmark = pytest.mark.library


class Torch(LossScaler):
    "torch's rule"
    def __init__(self, init_scale=2.**8, interval=2, **kw):
        super().__init__(init_scale, interval=interval, **kw)
        self.register_buffer('growth_tracker', torch.tensor(0))

    def next_scale(self, stats):
        bad = stats['found_inf'] > 0
        clean = torch.where(bad, 0, self.growth_tracker + 1)
        grow = clean == self.interval
        self.growth_tracker = torch.where(grow, 0, clean)
        return torch.where(bad, self.scale/2, torch.where(grow, self.scale*2, self.scale))


class InPlace(Torch):
    "The same, for those who write into their buffers"
    def next_scale(self, stats):
        bad = stats['found_inf'] > 0
        self.growth_tracker.add_(1).mul_(~bad)
        grow = self.growth_tracker == self.interval
        self.growth_tracker.mul_(~grow)
        return self.scale.mul_(torch.where(bad, .5, torch.where(grow, 2., 1.)))


class ALS(LossScaler):
    "Graphcore's rule"
    def __init__(self, init_scale=1., edge=2.**13, **kw): super().__init__(init_scale, edge=edge, **kw)

    @property
    def required_stats(self): return 'found_inf', 'numel', ('above', self.edge)

    def next_scale(self, stats):
        many = ~(stats['above', self.edge] <= 1e-7*stats['numel']) | (stats['found_inf'] > 0)
        return torch.where(many, self.scale/2, self.scale*2)


CONTRACT = dict(static=StaticScaler, by_hand=Torch, graphcore=ALS, in_place=InPlace, als=partial(ALSScaler, activations=False), layerwise=partial(LayerwiseScaler, ['0', '2']))
CONTRACT |= {name: partial(get_policy, name) for name in POLICIES}
policies = pytest.mark.parametrize('make', CONTRACT.values(), ids=CONTRACT)


class Stats(dict):
    "What the step hands over; no gradient is above an edge"
    def __missing__(self, key):
        if key[0] != 'above': raise KeyError(key)
        return torch.tensor(0.)


def stats(found=0., loss_finite=1., **more):
    seen = {'found_inf': found, 'loss_finite': loss_finite, 'numel': 1000., 'amax': torch.inf if found else 8., ('amax', 'loss'): 1., **more}
    return Stats((k, torch.tensor(float(v))) for k, v in seen.items())


def buffers(s): return {n: b.clone() for n, b in s.named_buffers()}
def same(a, b): return a.keys() == b.keys() and all(same_bits(a[k], b[k]) for k in a)


class NoReads(TorchDispatchMode):
    "Nothing may wait for the device"
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, 'a tensor is read: take torch.where'
        return func(*args, **(kwargs or {}))


# --- the contract ---

@policies
def test_the_arguments_make_the_policy_again(make):
    a = make(init_scale=4., skip_nonfinite_loss=False, max_scale=2.**20)
    b = type(a)(**a.config)
    assert b.config == a.config and same(buffers(a), buffers(b))
    assert (a.skip_nonfinite_loss, a.max_scale, a.init_scale) == (False, 2.**20, 4.)


def test_a_setting_that_was_changed_is_saved_as_it_is_now():
    a, b = Torch(), Torch()
    a.interval, a.max_scale = 1, 2.**9
    assert a.config['interval'] == 1
    b.load_state_dict(a.state_dict())
    assert (b.interval, b.max_scale) == (1, 2.**9) and b.config == a.config


@policies
@pytest.mark.parametrize('way', ['state', 'file', 'copy', 'pickle'])
def test_what_is_saved_goes_on_as_the_original(make, way, tmp_path):
    a = make(init_scale=64., min_scale=.25)
    for bad in (0, 1, 0): a.update(stats(bad))
    if way == 'copy': b = copy.deepcopy(a)
    elif way == 'pickle': b = pickle.loads(pickle.dumps(a))
    else:
        state = a.state_dict()
        if way == 'file':
            torch.save(state, tmp_path/'s.pt')
            state = torch.load(tmp_path/'s.pt', weights_only=True)
        b = make()
        b.load_state_dict(state)
    for bad in (0, 0, 1, 1, 0, 0, 0, 0):
        a.update(stats(bad)), b.update(stats(bad))
        assert same(buffers(a), buffers(b)) and a.config == b.config
    assert a.scale is not b.scale


@policies
def test_a_rule_reads_no_tensor_and_remembers_in_buffers(make):
    s = make()
    def outside(): return {k: v for k, v in vars(s).items() if k != '_buffers'}
    before, steps = copy.copy(outside()), [stats(bad) for bad in (0, 1, 0, 0, 1, 1)]
    with NoReads():
        for seen in steps: s.next_scale(seen)
    assert outside() == before, 'it remembers something outside of its buffers'


@policies
def test_the_scale_is_one_fp32_number_whatever_happens(make):
    s = make(init_scale=64., max_scale=2.**12)
    for bad in [0]*40 + [1]*40:
        s.update(stats(bad))
        assert s.scale.dtype == torch.float32 and s.scale.shape == () and s.min_scale <= s.scale <= 2**12 and not s.scale.requires_grad


# --- scales and losses ---

@pytest.mark.parametrize('s', [0, -1, -0., float('nan'), float('inf'), -float('inf'), 2.**-130, 2.**128, 1e300])
def test_a_scale_that_cannot_work_is_refused_with_its_value(s):
    with pytest.raises(ValueError) as e: StaticScaler(s, min_scale=2.**-126)
    assert str(s) in str(e.value)
    with pytest.raises(ValueError): Torch(.5)                             # below the floor of 1
    with pytest.raises(ValueError): Torch(8., max_scale=4.)
    with pytest.raises(ValueError): Torch(1., min_scale=2.**-127)


@pytest.mark.parametrize('s', [3., 1000, 2.**10 + 1])
def test_a_scale_that_is_no_power_of_two_warns_and_names_one(s):
    with pytest.warns(UserWarning) as w: assert validate_scale(s) == s
    assert f'{2**(int(s).bit_length() - 1)}' in str(w[0].message)


def test_losses_in_any_nest_are_scaled_and_others_refused():
    s, Pair, l = StaticScaler(8.), namedtuple('Pair', 'a b'), torch.tensor(.5)
    out = s.scale_loss(OrderedDict(a=l, b=[l, (l, l)], c=Pair(l, dict(d=l))))
    assert type(out) is OrderedDict and out['a'] == out['b'][0] == 4 and isinstance(out['b'][1], tuple) and out['b'][1][1] == 4
    assert isinstance(out['c'], Pair) and out['c'].b['d'] == 4 and l == .5
    for bad in (torch.ones(3), torch.ones(0), 3., None, [l, torch.ones(2, 1)], {'a': l, 'b': 'x'}):
        with pytest.raises(ValueError): s.scale_loss(bad)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_a_half_loss_is_scaled_in_fp32(dtype):
    for shape in ((), (1,)):                            # with an axis torch would multiply in half
        out = StaticScaler(2.**20).scale_loss(torch.full(shape, 3., dtype=dtype))
        assert out.dtype == torch.float32 and out == 3*2.**20


@pytest.mark.parametrize('s', [2.**-20, 1., 3., 1000., 2.**100])
def test_the_inverse_is_taken_in_fp64(s):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        scaler = StaticScaler(s)
    assert same_bits(scaler.inv_scale(), (1/torch.tensor(s, dtype=torch.float32).double()).float())
    scaler.scale.mul_(4)
    assert same_bits(scaler.inv_scale(), (.25/torch.tensor(s).double()).float())


# --- the holes ---

class Says(LossScaler):
    "A rule that gives what it is told"
    def __init__(self, says, **kw):
        super().__init__(8., **kw)
        self.says = says
    def next_scale(self, stats): return torch.tensor(self.says)


@pytest.mark.parametrize('says, want', [(torch.nan, 8), (torch.inf, 8), (-torch.inf, 8), (0., 1), (-3., 1), (2.**30, 2**20), (16., 16)])
def test_no_next_scale_gets_through_that_is_not_finite_or_out_of_bounds(says, want):
    "clamp alone lets NaN through"
    s = Says(says, max_scale=2.**20)
    s.update(stats())
    assert s.scale == want


def test_the_floor_may_be_lower():
    s = Says(0., min_scale=2.**-10)
    s.update(stats())
    assert s.scale == 2.**-10


@pytest.mark.parametrize('make', [Torch, InPlace, ALS])
def test_hold_keeps_every_buffer_where_the_loss_was_not_finite(make):
    s = make(2.**8)
    s.update(stats())
    before = buffers(s)
    for n in (1, 2, 3):
        s.update(stats(found=1, loss_finite=0))
        assert same(buffers(s), before | dict(held=torch.tensor(n)))
    s.update(stats(found=1))                                              # the scale's own doing: it falls
    assert s.scale < before['scale'] and s.held == 0


@pytest.mark.parametrize('make', [Torch, InPlace, ALS])
def test_without_hold_the_rule_decides_alone(make):
    s = make(2.**8, skip_nonfinite_loss=False)
    s.update(stats(found=1, loss_finite=0))
    assert s.scale == 2**7 and s.held == 0


@pytest.mark.parametrize('how', ['half', 'to', 'double', 'in a model', 'in a bfloat16 model'])
def test_a_scaler_keeps_its_dtypes(how):
    "A scale of 2^17 is infinite in FP16, and an integer counter is none in FP64"
    s = Torch(2.**17)
    before = buffers(s)
    if how == 'half': assert s.half() is s
    if how == 'to': s.to(torch.float16)
    if how == 'double': s.double()
    if how.startswith('in'):
        model = nn.Module()
        model.layer, model.scaler = nn.Linear(2, 2), s
        model.half() if how == 'in a model' else model.bfloat16()
        assert model.layer.weight.dtype.itemsize == 2 and model.scaler is s
    assert same(buffers(s), before)


def test_a_scaler_moves():
    s = Torch().to('meta')
    assert s.scale.is_meta and s.growth_tracker.is_meta and s.growth_tracker.dtype == torch.int64


GOOD = Torch(32.).state_dict()
BROKEN = {'nothing': {}, "torch's": torch.amp.GradScaler('cpu', enabled=True).state_dict(), 'another policy': StaticScaler().state_dict(),
          'half': {k: v for k, v in GOOD.items() if k != 'growth_tracker'}, 'without scale': {k: v for k, v in GOOD.items() if k != 'scale'},
          'one more': GOOD | dict(more=torch.ones(())), 'shape': GOOD | dict(scale=torch.ones(2)), 'dtype': GOOD | dict(scale=torch.ones(()).half()),
          'string': GOOD | dict(scale='1'), 'nan': GOOD | dict(scale=torch.tensor(torch.nan)), 'zero': GOOD | dict(scale=torch.tensor(0.)),
          'version': GOOD | dict(_extra_state=GOOD['_extra_state'] | dict(version=2)), 'no config': GOOD | dict(_extra_state=None)}


@pytest.mark.parametrize('within', [False, True])
@pytest.mark.parametrize('what', BROKEN)
def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(what, within):
    "Check first, then load; the keys are named"
    s = Torch(8., interval=5)
    s.update(stats())
    before, config, state = buffers(s), dict(s.config), dict(BROKEN[what])
    host = nn.ModuleDict(dict(scaler=s)) if within else s
    error = RuntimeError if within and what == 'nothing' else ValueError             # torch names missing keys itself
    with pytest.raises(error) as e: host.load_state_dict({f'scaler.{k}': v for k, v in state.items()} if within else state)
    wrong = {'half': 'growth_tracker', 'without scale': 'scale', 'one more': 'more', 'shape': 'scale', 'dtype': 'scale', 'string': 'scale', "torch's": '_growth_tracker'}
    assert wrong.get(what, '') in str(e.value)
    assert same(buffers(s), before) and s.config == config


def test_a_state_that_is_no_dict_is_refused():
    for what in ('foo', [1], None):
        with pytest.raises(TypeError): StaticScaler().load_state_dict(what)


def test_the_arguments_travel_with_name_and_version():
    a, b = ALS(4., edge=2.**10, skip_nonfinite_loss=False), ALS()
    about = a.state_dict()['_extra_state']
    assert about['policy'] == 'ALS' and about['version'] == 1 and about['config']['edge'] == 2**10
    b.load_state_dict(a.state_dict())
    assert b.edge == 2**10 and ('above', 2.**10) in b.required_stats and b.skip_nonfinite_loss is False and b.scale == 4


def test_a_model_without_a_scalers_state_loads_where_it_is_not_strict():
    model = nn.ModuleDict(dict(net=nn.Linear(2, 2), scaler=Torch()))
    bare = {k: v for k, v in model.state_dict().items() if not k.startswith('scaler')}
    model.load_state_dict(bare, strict=False)
    with pytest.raises(RuntimeError): model.load_state_dict(bare)          # torch's own, as for any module


# --- a measured scale ---

@pytest.mark.parametrize('name', ['relu_mlp', 'cnn', 'deep_sigmoid', 'char_lm', 'two_towers'])
def test_a_measured_scale_puts_the_largest_gradient_below_two_to_the_ten(name):
    toy = get_toy(name)
    model, batch = toy.model(), next(batches(toy.data(), toy.bs, 1))
    s = StaticScaler.measured(model, batch, toy.loss_func)
    pred = model(*batch[0]) if isinstance(batch[0], tuple) else model(batch[0])
    toy.loss_func(pred, batch[1]).backward()
    amax = max(p.grad.abs().max() for p in model.parameters())
    assert 2**9 < amax*s.scale <= 2**10 and type(s) is StaticScaler


def test_measuring_changes_nothing():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model[0].weight.requires_grad_(False)
    x, y = torch.randn(16, 6), torch.randint(3, (16,))
    before = copy.deepcopy(model.state_dict())
    model[2].bias.grad = torch.ones(3)
    a = StaticScaler.measured(model, (x, y), F.cross_entropy)
    assert same(before, model.state_dict()) and (model[2].bias.grad == 1).all() and model[2].weight.grad is None
    b = StaticScaler.measured(model, (x, y), lambda p, t: F.cross_entropy(p, t)/2**40)
    assert b.scale == a.scale*2**40 and StaticScaler.measured(model, (x, y), F.cross_entropy, target=1.).scale == a.scale/2**10


@pytest.mark.parametrize('loss', [lambda p, y: p.sum()*0, lambda p, y: p.sum()*torch.inf, lambda p, y: p.sum()*torch.nan])
def test_no_scale_is_measured_from_gradients_that_are_zero_or_not_finite(loss):
    with pytest.raises(ValueError): StaticScaler.measured(nn.Linear(2, 2), (torch.ones(1, 2), None), loss)


def test_a_nan_that_is_not_the_first_is_seen_in_measuring():
    "max of Python numbers would let it through: no number is smaller than a NaN, and none larger"
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        def forward(self, x): return x*self.a + torch.nan*self.b
    with pytest.raises(ValueError, match='nan'): StaticScaler.measured(Two(), (torch.ones(2), None), lambda p, y: p.sum())


# --- ranks ---

def test_one_process_has_nothing_to_add_up():
    s = stats()
    assert reduce_stats(s) is s


def test_statistics_are_summed_over_ranks_and_maxima_are_maxima(ranks):
    seen = ranks('''
from mpcourse.scaler import reduce_stats
t = torch.tensor
mine = {'found_inf': t([0., 1.][rank]), 'amax': t([3., 5.][rank]), ('above', 2.): t(rank + 1), ('amax', 'x'): t([torch.inf, 2.][rank])}
if rank: mine = dict(reversed(mine.items()))
out = {n: v.item() for n, v in reduce_stats(mine, dist.group.WORLD).items()}
torch.save(out, f'{folder}/{rank}.pt')
''')
    assert seen[0] == seen[1] == {'found_inf': 1, 'amax': 5, ('above', 2.): 3, ('amax', 'x'): torch.inf}


# --- CONTRIBUTING ---

@pytest.mark.chapters('index')
def test_a_policy_is_written_from_contributings_paragraph():
    "Three names are enough, and the paragraph has them"
    text = (ROOT/'CONTRIBUTING.md').read_text(encoding='utf-8')
    paragraph = re.search(r'## Add a loss scaler\n\n(.+?)\n\n##', text, re.S)[1]
    assert '\n' not in paragraph.strip() and {'LossScaler', 'required_stats', 'next_scale'} <= set(re.findall(r'\w+', paragraph))

    class LogMax(LossScaler):
        required_stats = 'found_inf', 'amax'

        def __init__(self, init_scale=2.**10, target=2.**12, **config): super().__init__(init_scale, target=target, **config)

        def next_scale(self, stats):
            fits = self.scale*torch.exp2((self.target/stats['amax']).log2().floor())
            return torch.where(stats['found_inf'] > 0, self.scale/2, fits)

    from mpcourse.step import MixedStep
    toy, scaler = get_toy('deep_sigmoid'), LogMax()
    model, step = toy.model(), MixedStep(scaler)
    opt = toy.opt(model.parameters())
    for x, y in batches(toy.data(), toy.bs, 5):
        used, out = scaler.scale.item(), step(model, x, y, opt, toy.loss_func)
        amax = max(p.grad.abs().max() for p in model.parameters())
        assert not out['skipped'] and scaler.scale == used*2.**(2.**12/(amax*used)).log2().floor()
    twin = LogMax()
    twin.load_state_dict(scaler.state_dict())
    assert twin.scale == scaler.scale


@pytest.mark.parametrize('make', [StaticScaler, Torch, ALS])
def test_an_argument_that_nobody_has_is_refused(make):
    with pytest.raises(ValueError, match='nonsense'): make(nonsense=1)
