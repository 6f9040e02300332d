"""Random lives of scalers, random models through every conversion. A bounded number of cases here; `make fuzz` runs 100,000.

FUZZ=n asks for n lives of up to 30 steps of each scaler, and 10·n models of each kind; a failure prints the smallest case that shows it."""
import copy, math, os, pickle, warnings

import torch, torch.nn.functional as F
from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import nn

from mpcourse.formats import same_bits
from mpcourse.fp8 import simulate_fp8
from mpcourse.gradscaler import GradScaler
from mpcourse.half import model_to_half
from mpcourse.monitor import TensorCollector
from mpcourse.policies import POLICIES, RULES, follow_rule, get_policy
from mpcourse.unit_models import unit_scale

CASES = int(os.environ.get('FUZZ', 15))
lives = settings(max_examples=CASES, deadline=None, derandomize='FUZZ' not in os.environ, database=None,
                 suppress_health_check=list(HealthCheck), stateful_step_count=30)
models = settings(lives, max_examples=10*CASES)


# --- scalers ---

class DropIn(RuleBasedStateMachine):
    "Our GradScaler without hold beside torch's, whatever happens to both"
    @initialize(init=st.integers(0, 20), interval=st.integers(1, 4), growth=st.sampled_from([2., 4.]), backoff=st.sampled_from([.5, .25]))
    def begin(self, init, interval, growth, backoff):
        self.kw = dict(init_scale=2.**init, growth_interval=interval, growth_factor=growth, backoff_factor=backoff)
        self.both = [GradScaler('cpu', skip_nonfinite_loss=False, **self.kw), torch.amp.GradScaler('cpu', **self.kw)]
        self.ps = [nn.Parameter(torch.ones(2)) for _ in range(2)]
        self.opts = [torch.optim.SGD([p], lr=2.**-10, momentum=.5) for p in self.ps]

    def each(self): return zip(self.both, self.ps, self.opts)

    @rule(value=st.sampled_from([1., .5, 0., math.inf, math.nan, 2.**14, 2.**-30]), early=st.booleans(), clip=st.booleans())
    def step(self, value, early, clip):
        for s, p, opt in self.each():
            s.scale(torch.ones(()))
            p.grad = torch.tensor([value, .25])*s.get_scale()
            if early or clip: s.unscale_(opt)
            if clip: nn.utils.clip_grad_norm_([p], 1.)
            s.step(opt)
            s.update()

    @rule(new=st.integers(0, 16))
    def set_scale(self, new):
        for s, p, opt in self.each():
            s.scale(torch.ones(()))
            s.update(2.**new)

    @rule()
    def save_and_load(self):
        for i, s in enumerate(self.both):
            fresh = GradScaler('cpu', skip_nonfinite_loss=False) if i == 0 else torch.amp.GradScaler('cpu')
            fresh.load_state_dict(copy.deepcopy(s.state_dict()))
            self.both[i] = fresh

    @rule()
    def move_to_torchs_and_back(self):
        state = self.both[1].state_dict()
        self.both[0] = GradScaler('cpu', skip_nonfinite_loss=False)
        self.both[0].load_state_dict(state)

    @rule()
    def pickled(self): self.both = pickle.loads(pickle.dumps(self.both))

    @invariant()
    def alike(self):
        if not hasattr(self, 'both'): return
        ours, theirs = self.both
        want = theirs.get_scale()
        if want < 1:                                    # torch's has no floor: begin again
            self.begin(10, self.kw['growth_interval'], 2., .5)
            return
        assert ours.get_scale() == want and ours._get_growth_tracker() == theirs._get_growth_tracker()
        assert torch.equal(*self.ps), self.ps


class Policy(RuleBasedStateMachine):
    "A scaler of the library beside the published rule on Python numbers, saved, copied and loaded on the way"
    @initialize(name=st.sampled_from([n for n in POLICIES if n in RULES and n != 'logmax']), init=st.integers(10, 20))
    def begin(self, name, init):
        self.name, self.init, self.trace = name, min(2.**init, get_policy(name).max_scale), ''
        self.scaler, self.stopped = self.made(), False

    def made(self):
        warnings.simplefilter('ignore')
        return get_policy(self.name, init_scale=self.init)

    @rule(bad=st.lists(st.booleans(), min_size=1, max_size=40))
    def live(self, bad):
        for b in bad:
            self.scaler.update(dict(found_inf=torch.tensor(float(b)), loss_finite=torch.tensor(1.), numel=torch.tensor(1.)))
            self.trace += '01'[b]

    @rule(good=st.integers(100, 600))
    def calm(self, good): self.live([False]*good)

    @rule()
    def resumed(self):
        fresh = self.made()
        fresh.load_state_dict(pickle.loads(pickle.dumps(self.scaler.state_dict())))
        self.scaler = fresh

    @rule()
    def copied(self): self.scaler = copy.deepcopy(self.scaler).to('cpu').half()

    @invariant()
    def alike(self):
        if not getattr(self, 'trace', ''): return
        try: scales = follow_rule(self.name, self.trace, dict(scale=self.init))
        except FloatingPointError: scales = []
        if not scales or min(scales) <= 1: return self.begin(self.name, round(math.log2(self.init)))    # the rule has no floor
        assert self.scaler.scale == scales[-1], (self.name, self.trace)


TestDropIn, TestPolicy = DropIn.TestCase, Policy.TestCase
TestDropIn.settings = TestPolicy.settings = lives


# --- models ---

class Residual(nn.Module):
    def __init__(self, inner): super().__init__(); self.inner = inner
    def forward(self, x): return x + self.inner(x)


class Positions(nn.Module):
    "A buffer of angles, as of rotary embeddings"
    def __init__(self): super().__init__(); self.register_buffer('angles', torch.arange(6.)[:, None]*10.**-torch.linspace(0, 3, 16))
    def forward(self, x): return x*self.angles.cos().to(x.dtype) + x.roll(1, -1)*self.angles.sin().to(x.dtype)


class Attention(nn.Module):
    def __init__(self): super().__init__(); self.net = nn.MultiheadAttention(16, 4, batch_first=True)
    def forward(self, x): return self.net(x, x, x, need_weights=False)[0]


class Bilinear(nn.Module):
    "A parameter that is used outside any layer"
    def __init__(self): super().__init__(); self.w = nn.Parameter(torch.randn(16, 16)/4)
    def forward(self, x): return torch.einsum('bti,ij->btj', x, self.w)


class Convolved(nn.Module):
    def __init__(self): super().__init__(); self.net = nn.Conv1d(16, 16, 3, padding=1)
    def forward(self, x): return self.net(x.mT).mT


class Gated(nn.Module):
    def __init__(self): super().__init__(); self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
    def forward(self, x): return F.silu(self.a(x))*self.b(x)


class Recurrent(nn.Module):
    def __init__(self): super().__init__(); self.net = nn.GRU(16, 16, batch_first=True)
    def forward(self, x): return self.net(x)[0]


class Batched(nn.Module):
    def __init__(self): super().__init__(); self.net = nn.BatchNorm1d(16)
    def forward(self, x): return self.net(x.mT).mT


def normed():
    return nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))


LAYERS = dict(linear=lambda: nn.Linear(16, 16), norm=lambda: nn.LayerNorm(16), relu=nn.ReLU, gelu=nn.GELU, softmax=lambda: nn.Softmax(-1),
              positions=Positions, attention=Attention, bilinear=Bilinear, conv=Convolved, gated=Gated, recurrent=Recurrent,
              batchnorm=Batched, weight_norm=normed, rms=lambda: nn.RMSNorm(16),
              encoder=lambda: nn.TransformerEncoderLayer(16, 2, 32, 0., batch_first=True))
layers = st.lists(st.tuples(st.sampled_from(sorted(LAYERS)), st.booleans()), min_size=1, max_size=5)


def net(plan, seed, shared):
    "A random model: some layers residual, the last perhaps the first once more"
    torch.manual_seed(seed)
    made = [Residual(LAYERS[n]()) if residual else LAYERS[n]() for n, residual in plan]
    if shared: made.append(made[0])
    return nn.Sequential(*made, nn.Linear(16, 5)).eval()


def off(a, b): return ((a.float() - b).norm()/b.norm().clamp(min=1e-3)).item()


random_net = given(plan=layers, seed=st.integers(0, 10**6), shared=st.booleans(), training=st.booleans())


@random_net
@models
def test_half_is_near_fp32(plan, seed, shared, training):
    model, x = net(plan, seed, shared).train(training), torch.randn(4, 6, 16)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    want = model(x).detach()
    model.load_state_dict(before)
    with torch.autocast('cpu', torch.float16): got = model(x)
    assert off(got, want) < .03, plan
    assert all(p.dtype == torch.float32 for p in model.parameters())
    got.float().square().sum().backward()
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())
    model.load_state_dict(before)
    with torch.no_grad(): got = model_to_half(copy.deepcopy(model).eval())(x.half())
    with torch.no_grad(): want = model.eval()(x)
    assert off(got, want) < .03, plan


@random_net
@models
def test_eight_bits_are_near_or_refused(plan, seed, shared, training):
    model, x = net(plan, seed, shared), torch.randn(4, 6, 16)
    with torch.no_grad(): want = model(x)
    try:
        with torch.no_grad(): got = simulate_fp8(model)(x)
    except ValueError as e:
        assert {'recurrent', 'bilinear'} & {n for n, _ in plan}, (plan, e)
        return
    assert not {'recurrent', 'bilinear'} & {n for n, _ in plan} and off(got, want) < .6, plan


@random_net
@models
def test_a_collector_changes_no_bit(plan, seed, shared, training):
    def trained(watch):
        model, x = net(plan, seed, shared).train(), torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(seed))
        opt = torch.optim.SGD(model.parameters(), lr=2.**-8)
        with TensorCollector(model, every=2) as c:
            if not watch: c.close()
            for _ in range(3):
                opt.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                opt.step()
                if watch: c.step(loss)
        return model.state_dict(), c.frame().step.nunique() if watch else 0
    (a, n), (b, _) = trained(True), trained(False)
    assert n == 2 and all(same_bits(a[k], b[k]) for k in a), plan


@random_net
@models
def test_unit_scaling_converts_or_names_what_it_does_not_know(plan, seed, shared, training):
    model, x = net(plan, seed, shared), torch.randn(4, 6, 16)
    names = [type(m).__name__ for m in model.modules()]
    try: scaled = unit_scale(model)
    except (ValueError, TypeError) as e:
        assert any(n in str(e) for n in names) or 'einsum' in str(e) or any(n in str(e) for n, _ in model.named_modules() if n), (plan, e)
        return
    with torch.no_grad(): got = scaled(x)
    assert got.shape == (4, 6, 5) and got.isfinite().all(), plan
