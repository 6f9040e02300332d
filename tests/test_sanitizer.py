"Where precision is lost: the cases beyond the chapter's"
import json, math
from contextlib import nullcontext
from functools import partial

import pytest, torch, torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpcourse.emulate import emulate_format
from mpcourse.formats import same_bits
from mpcourse.fp8 import RECIPES
from mpcourse.gradscaler import GradScaler
from mpcourse.layerwise import LayerwiseScaler
from mpcourse.monitor import TensorCollector
from mpcourse.rounding import quantize
from mpcourse.sanitizer import note_errors, probe_precision, sanitize
from mpcourse.shadows import is_tool, measure_error
from mpcourse.toys import batches, get_toy

pytestmark = pytest.mark.library
MSE = F.mse_loss


def data(n=16, d=8, out=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=g), torch.randn(n, out, generator=g)


def mlp(*widths, act=nn.ReLU):
    torch.manual_seed(0)
    layers = []
    for a, b in zip(widths, widths[1:]): layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


class Offset(nn.Module):
    "Adds a number that a later line takes away again: sound in FP32"
    def __init__(self, offset=700.):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.offset = nn.Linear(8, 8), nn.Linear(8, 4), offset

    def forward(self, x):
        h = self.up(x).to(self.up.weight.dtype)
        high = h + self.offset
        return self.down(high - self.offset)


# --- what is found ---

def test_the_line_of_an_offset_and_not_the_lines_after_it():
    row = probe_precision(Offset(), data(), MSE, 'bf16 weights').worst
    assert (row.kind, row.op, row.code) == ('a large offset', 'add', 'high = h + self.offset')
    assert row.error > .5 and row.carried < .02 and row.own == pytest.approx(row.error, rel=.2)


@pytest.mark.parametrize('scheme', ['bf16', 'fp16', 'bf16 weights', None, RECIPES['tensorwise'], partial(emulate_format, 'bf16')],
                         ids=['bf16', 'fp16', 'bf16 weights', 'own', 'recipe', 'context'])
def test_a_healthy_net_is_not_accused(scheme):
    report = probe_precision(mlp(8, 16, 16, 4), data(), MSE, scheme)
    assert not report.findings and ('Nothing found' in str(report)) == (scheme is not None)
    assert any(r.error > 0 for r in report.rows) == (scheme is not None)


def test_without_few_bits_there_is_no_error():
    report = probe_precision(mlp(8, 16, 4), data(), MSE, None)
    assert not report.rows and 'No operation in few bits' in str(report)


def test_errors_are_those_of_two_plain_runs():
    net, (x, y) = mlp(8, 16, 4), data()
    with torch.autocast('cpu', torch.bfloat16): low = net(x).float()
    ref = net(x)
    rows = [r for r in probe_precision(net, (x, y), MSE, 'bf16', most=10**9).rows if r.module == '2' and not r.backward]
    want = ((low - ref).square().mean().sqrt()/ref.std()).item()
    assert rows[-1].error == pytest.approx(want, rel=.1)            # sums of products may be in another order


def test_an_underflow_and_the_scale_that_cures_it():
    toy = get_toy('deep_sigmoid')
    args = toy.model(0), next(batches(toy.data(), toy.bs, 1)), toy.loss_func, 'fp16'
    row = probe_precision(*args).worst
    assert (row.kind, row.backward) == ('underflow', True) and row.flushed > .2
    assert not probe_precision(*args, scale=2.**14).findings


def test_a_scale_that_is_too_large():
    row = probe_precision(mlp(8, 16, 4), data(), MSE, 'fp16', scale=2.**30).worst
    assert (row.kind, row.backward, row.error) == ('overflow', True, math.inf)


def test_the_first_overflow_is_found_where_it_begins():
    toy = get_toy('char_lm')
    lm, text = toy.model(0), next(batches(toy.data(), 4, 1))
    assert probe_precision(lm, text, toy.loss_func, 'fp16').worst is None, 'a mask is minus infinity in FP32, too'
    with torch.no_grad(): lm.blocks[1].attn.qkv.weight.mul_(2.**9)
    row = probe_precision(lm, text, toy.loss_func, 'fp16').worst
    assert (row.kind, row.module, row.backward) == ('overflow', 'blocks.1.attn', False) and row.code.startswith('scores = q @ k')
    x, y = data()
    x[3] = 1e5
    row = probe_precision(mlp(8, 16, 4), (x, y), MSE, 'fp16').worst
    assert (row.kind, row.op, row.module) == ('overflow', '_to_copy', '0')


def test_updates_that_are_swallowed_and_those_that_are_not():
    net = mlp(8, 16, 4)
    small, large = (torch.optim.SGD(net.parameters(), lr) for lr in (1e-6, 10.))
    found, = probe_precision(net, data(), MSE, 'bf16 weights', opt=small).findings
    assert found.kind == 'swallowed updates' and found.still > .9 and found.others == 3 and 'and 3 more' in str(found)
    def kinds(scheme, opt): return {f.kind for f in probe_precision(net, data(), MSE, scheme, opt=opt).findings}
    assert 'swallowed updates' not in kinds('bf16 weights', large) | kinds('bf16', small)


def test_a_cast_that_loses_its_values():
    class Times(nn.Module):
        def __init__(self): super().__init__(); self.lin = nn.Linear(1, 4)
        def forward(self, t):
            low = t.to(torch.bfloat16)
            return self.lin(low.float()/1000)
    row = probe_precision(Times(), (torch.arange(984., 1000.)[:, None], torch.zeros(16, 4)), MSE, None).worst
    assert row.kind == 'a large offset' and row.code == 'low = t.to(torch.bfloat16)'
    row = probe_precision(Times(), (torch.arange(984, 1000)[:, None], torch.zeros(16, 4)), MSE, None).worst
    assert row.kind == 'lost values' and row.code == 'low = t.to(torch.bfloat16)'


# --- models ---

class Recurrent(nn.Module):
    def __init__(self): super().__init__(); torch.manual_seed(0); self.cell, self.out = nn.GRUCell(8, 8), nn.Linear(8, 4)
    def forward(self, x):
        h = torch.zeros(len(x), 8)
        for _ in range(5): h = self.cell(x, h)
        return self.out(h)

class Checkpointed(nn.Module):
    def __init__(self): super().__init__(); self.a, self.b = mlp(8, 16, 8), mlp(8, 8, 4)
    def forward(self, x): return self.b(checkpoint(self.a, x, use_reentrant=False))

class InPlace(nn.Module):
    def __init__(self): super().__init__(); torch.manual_seed(0); self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)
    def forward(self, x):
        h = self.a(x)
        h = h.add_(1).mul_(.5).relu_()
        out = torch.zeros_like(h)
        out[:, :4] = h[:, 4:]
        return self.b(out + h)

class Attention(nn.Module):
    def __init__(self): super().__init__(); torch.manual_seed(0); self.att, self.out = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 4)
    def forward(self, x): return self.out(self.att(x[:, None], x[:, None], x[:, None], need_weights=False)[0][:, 0])

class LoRA(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.base, self.a, self.b = nn.Linear(8, 4).to(torch.bfloat16).requires_grad_(False), nn.Linear(8, 2, bias=False), nn.Linear(2, 4, bias=False)
    def forward(self, x): return self.base(x.to(torch.bfloat16)).float() + self.b(self.a(x))

class Dropped(nn.Module):
    def __init__(self): super().__init__(); self.net = nn.Sequential(mlp(8, 32, 16), nn.Dropout(.5), mlp(16, 4))
    def forward(self, x): return self.net(x)

class Shared(nn.Module):
    def __init__(self): super().__init__(); torch.manual_seed(0); self.lin = nn.Linear(8, 8)
    def forward(self, x): return self.lin(self.lin(x).relu())[:, :4]


@pytest.mark.parametrize('make', [Recurrent, Checkpointed, InPlace, Attention, LoRA, Dropped, Shared, lambda: nn.LSTM(8, 4), lambda: nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))])
def test_models_of_many_kinds_are_compared_to_the_end(make):
    model = make()
    loss_func = (lambda p, y: MSE(p[0], y)) if isinstance(model, nn.LSTM) else MSE
    scheme = None if isinstance(model, LoRA) else 'bf16'
    report = probe_precision(model, data(), loss_func, scheme)
    assert not report.findings
    followed = sum(report.lost.values()) == 0
    assert followed != isinstance(model, nn.LSTM) and (not followed or {r.backward for r in report.rows} == {False, True})
    if not followed: assert 'were not followed: mkldnn_rnn_layer' in str(report)
    else: assert set(report.gradients) == {n for n, p in model.named_parameters() if p.requires_grad}


def test_a_batch_may_be_a_mapping_and_losses_a_nest():
    class Named(nn.Module):
        def __init__(self): super().__init__(); self.lin = mlp(8, 4)
        def forward(self, x, mask): return dict(out=self.lin(x)*mask)
    x, y = data()
    report = probe_precision(Named(), (dict(x=x, mask=torch.ones(16, 1)), y), lambda p, y: [MSE(p['out'], y), p['out'].abs().mean()])
    assert not report.findings


def test_a_compiled_model_is_looked_at_as_it_was_written():
    net = mlp(8, 16, 4)
    plain, compiled = (probe_precision(m, data(), MSE) for m in (net, torch.compile(net)))
    assert [(r.op, r.error) for r in plain.rows] == [(r.op, r.error) for r in compiled.rows]


def test_two_players_and_two_optimizers():
    game = nn.ModuleDict(dict(g=mlp(8, 16, 8), d=mlp(8, 16, 1)))
    class Play(nn.Module):
        def __init__(self): super().__init__(); self.players = game
        def forward(self, z): return game['d'](game['g'](z))
    report = probe_precision(Play(), (data()[0], torch.ones(16, 1)), F.binary_cross_entropy_with_logits)
    assert not report.findings


# --- promises ---

def test_nothing_of_the_users_changes():
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 4))
    opt = torch.optim.Adam(net.parameters())
    net(data()[0]).sum().backward()
    opt.step()
    def bits(): return [t.clone() for t in (*net.state_dict().values(), *(p.grad for p in net.parameters()), *(s['exp_avg'] for s in opt.state.values()))]
    before, random = bits(), torch.get_rng_state()
    probe_precision(net, data(), MSE, 'bf16 weights', opt=opt)
    assert all(torch.equal(a, b) for a, b in zip(before, bits())) and torch.equal(random, torch.get_rng_state())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_an_error_in_the_model_leaves_no_hooks_and_is_the_users():
    class Broken(nn.Module):
        def __init__(self): super().__init__(); self.lin = mlp(8, 4)
        def forward(self, x): raise KeyError('mine')
    net = Broken()
    with pytest.raises(KeyError, match='mine'): probe_precision(net, data(), MSE)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


@pytest.mark.parametrize('scheme', ['bf17', 'fp8', 'bf16 weight', 3])
def test_an_unknown_scheme_is_named(scheme):
    with pytest.raises(ValueError, match='bf16 weights') as e: probe_precision(mlp(8, 4), data(), MSE, scheme)
    assert repr(scheme) in str(e.value)


def test_a_sample_is_near_the_whole():
    net, batch = mlp(64, 512, 4), data(512, 64)
    few, all_ = (probe_precision(net, batch, MSE, 'bf16', most=n).rows for n in (4096, None))
    assert [r.op for r in few] == [r.op for r in all_]
    assert all(a.error == pytest.approx(b.error, rel=.3, abs=1e-3) for a, b in zip(few, all_))


def error(ref, low): return measure_error(low.double().numpy(), ref.double().numpy(), torch.bfloat16).error


def test_the_measure():
    ref = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) + 700
    assert error(ref, ref) == 0 and error(ref, quantize(ref, 'bf16')) == pytest.approx(1., abs=.3)
    assert error(torch.ones(4), torch.full((4,), 1.5)) == .5            # a constant: over its size
    assert error(torch.zeros(4), torch.full((4,), 1e-3)) == 1           # zero: over what is there
    assert error(ref, torch.full_like(ref, math.inf)) == math.inf
    masked = torch.tensor([1., 2., -math.inf])
    assert error(masked, masked) == 0
    assert error(torch.tensor([1., 3., -1e9]), torch.tensor([1., 2., -math.inf])) == pytest.approx(.5**.5)


# --- faults of the tool itself ---

class Scores(nn.Module):
    "Attention whose future is masked by a number"
    def __init__(self, mask): super().__init__(); torch.manual_seed(0); self.qk, self.v, self.mask = nn.Linear(8, 16), nn.Linear(8, 4), mask
    def forward(self, x):
        q, k = self.qk(x).chunk(2, -1)
        scores = q @ k.T
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        if self.mask is None: scores = scores.masked_fill(future, torch.finfo(scores.dtype).min)
        else: scores = scores + torch.zeros(scores.shape).masked_fill(future, self.mask).to(scores.dtype)
        return scores.softmax(-1) @ self.v(x)


@pytest.mark.parametrize('mask', [None, -1e9, -1e4, -math.inf])
@pytest.mark.parametrize('scheme', ['fp16', 'fp16 weights', 'bf16'])
def test_a_mask_is_not_an_overflow(mask, scheme):
    report = probe_precision(Scores(mask), data(), MSE, scheme)
    assert not report.findings


def test_an_op_that_enlarges_an_error_is_not_told_to_use_more_bits():
    class Steep(nn.Module):
        def __init__(self): super().__init__(); torch.manual_seed(0); self.lin = nn.Linear(8, 4)
        def forward(self, x): return (self.lin(x)*300).sin()
    row = probe_precision(Steep(), data(), MSE, 'bf16').worst
    assert (row.kind, row.op) == ('an enlarged error', 'sin') and row.own < row.error/4


def test_a_gradient_that_is_zero_is_not_the_largest_error():
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    report = probe_precision(net, data(), MSE)
    assert not report.findings and report.gradients['0.bias'] == 0


def test_single_numbers_are_compared():
    class Total(nn.Module):
        def __init__(self): super().__init__(); self.lin = mlp(8, 4)
        def forward(self, x): return self.lin(x).square().bfloat16().sum()[None]
    report = probe_precision(Total(), (data()[0], torch.zeros(1)), MSE, None)
    assert [r.error > 1e-4 for r in report.rows if r.op == 'sum' and not r.backward] == [True]


def test_the_batch_is_not_touched_and_may_be_used_again():
    "`contiguous` and `float` return the batch itself"
    class Again(nn.Module):
        def __init__(self): super().__init__(); torch.manual_seed(0); self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)
        def forward(self, x): return self.b(self.a(x).relu() + x.contiguous().float())
    batch = data()
    for net in (Again(), mlp(8, 4)): assert not probe_precision(net, batch, MSE).findings
    assert not vars(batch[0])


def test_a_single_number_that_overflows_is_named():
    class Norm(nn.Module):
        def __init__(self): super().__init__(); self.lin = mlp(8, 4)
        def forward(self, x):
            h = self.lin(x)*1000
            total = (h*h).half().sum()
            return h/total
    row = probe_precision(Norm(), data(), MSE, None).worst
    assert row.kind == 'overflow' and 'total' in row.code


def test_a_collection_gets_the_errors_of_the_probe():
    net, batch = mlp(8, 16, 4), data()
    with TensorCollector(net, 2, ('activation', 'weight_grad'), stats='norm') as c:
        for _ in range(2):
            note_errors(c, batch, MSE, 'bf16')
            MSE(net(batch[0]), batch[1]).backward()
            c.step()
    report = probe_precision(net, batch, MSE, 'bf16')
    errors = {(r['name'], r['kind']): r['error'] for r in c.records}
    assert {r['step'] for r in c.records} == {0}
    assert errors['2', 'activation'] == [r.error for r in report.rows if r.module == '2' and not r.backward][-1] > 0
    assert errors['0.weight', 'weight_grad'] == report.gradients['0.weight'] > 0
    with pytest.raises(ValueError, match='scale for each layer'): note_errors(TensorCollector(net, 1, scaler=LayerwiseScaler(net)), batch, MSE)


def test_nan_in_fp32_is_told_unless_it_is_masked_away():
    class Filled(nn.Module):
        def __init__(self): super().__init__(); self.lin = mlp(8, 4)
        def forward(self, x):
            gaps = torch.full_like(x, math.nan)
            return self.lin(torch.where(gaps.isnan(), x, gaps))
    assert 'NaN' not in str(probe_precision(Filled(), data(), MSE))
    net = Offset()
    net.down.weight.data[0] = math.nan
    said = str(probe_precision(net, data(), MSE, 'bf16 weights'))
    assert 'NaN in FP32, too. The first: ' in said and 'earlier step' in said


@pytest.mark.parametrize('size', [1e-8, 1e6])
def test_a_loss_scale_is_advised_for_gradients_alone(size):
    class Sized(nn.Module):
        def __init__(self): super().__init__(); self.lin = mlp(8, 4)
        def forward(self, x): return (self.lin(x).half()*size).float()/size
    row = probe_precision(Sized(), data(), MSE, None).worst
    assert (row.kind, row.backward) == ('overflow' if size > 1 else 'underflow', False) and row.advice.startswith('compute this op in FP32') and 'scale' not in row.advice
    report = probe_precision(mlp(8, 16, 4), data(), MSE, 'fp16', scale=2.**30 if size > 1 else 2.**-20)
    assert report.worst.kind == row.kind and report.worst.backward and f'First try: use a {"smaller" if size > 1 else "larger"} loss scale' in str(report)


def test_the_cast_of_the_inputs_is_compared():
    class Clock(nn.Module):
        def __init__(self): super().__init__(); self.lin = mlp(9, 4)
        def forward(self, x, t): return self.lin(torch.cat([x, ((t.float() - 1.7e9)/86400).to(x.dtype)], 1))
    x, y = data()
    t = 1.7e9 + 8640*torch.arange(16.)[:, None]
    for batch in (dict(x=x, t=t), (x, t)):
        found = probe_precision(Clock(), (batch, y), MSE, 'bf16 weights').worst
        assert (found.kind, found.op, found.module, found.backward) == ('a large offset', '_to_copy', 'the inputs of the batch', False)
        assert not probe_precision(Clock(), (batch, y), MSE, 'bf16').findings
    assert not probe_precision(mlp(8, 16, 4), data(), MSE, 'bf16 weights').findings


def test_what_a_cancellation_takes_is_traced_to_its_line():
    class Gap(nn.Module):
        def __init__(self): super().__init__(); torch.manual_seed(0); self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 4)
        def forward(self, x):
            h = self.up(x).exp()
            total = h.cumsum(0)
            seen = total.reshape(-1, 8)
            steps = seen[1:] - seen[:-1]
            return self.down(steps)
    x, y = data(2000)
    report = probe_precision(Gap(), (x, y[1:]), MSE, 'bf16 weights')
    row = report.worst
    assert (row.kind, row.code) == ('cancellation', 'steps = seen[1:] - seen[:-1]')
    assert 'What it takes was made by cumsum, at test_sanitizer.py:' in str(report) and row.source[0] == 'cumsum'


def test_a_buffer_in_half_that_does_not_move_is_told():
    class Running(nn.Module):
        def __init__(self, rate): super().__init__(); self.register_buffer('mean', torch.ones(8)); self.lin, self.rate = mlp(8, 4), rate
        def forward(self, x):
            with torch.no_grad(): self.mean.lerp_(x.mean(0), self.rate)
            hidden = torch.zeros(16, 1, dtype=torch.bool)
            hidden[:2] = True                                       # no float is written
            return self.lin((x - self.mean).masked_fill(hidden, 0))
    row = probe_precision(Running(.001), data(), MSE, 'bf16 weights').worst
    assert (row.kind, row.op, row.still, row.name) == ('stands still', 'lerp_', 1., 'mean')
    for rate, scheme in ((.1, 'bf16 weights'), (.001, 'bf16'), (.001, None)): assert not probe_precision(Running(rate), data(), MSE, scheme).findings


# --- nets that differentiate inside, checkpoint, or call their methods as we do ---

class Inside(nn.Module):
    "What is trained: a function and its derivative"
    def __init__(self, kind):
        super().__init__()
        self.kind, self.f = kind, nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x):
        x = x.detach().requires_grad_()
        u = self.f(x)
        if self.kind == 'looked at': torch.autograd.grad(u.sum(), x, create_graph=True)
        if self.kind == 'penalty': return u + torch.autograd.grad(u.sum(), x, create_graph=True)[0].square().sum(1, keepdim=True)
        return u


@pytest.mark.parametrize('kind', ['plain', 'looked at', 'penalty'])
def test_the_same_arithmetic_twice_shows_no_error(kind):
    torch.manual_seed(0)
    report = probe_precision(Inside(kind), (torch.randn(64, 16), torch.zeros(64, 1)), F.mse_loss, 'bf16')
    assert not report.findings and max(r.error for r in report.rows) < .05
    assert sum(r.backward for r in report.rows) >= 3


class Block(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant, self.head = reentrant, nn.Linear(64, 4)
        self.block = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x):
        from torch.utils.checkpoint import checkpoint
        return self.head(self.block(x) if self.reentrant is None else checkpoint(self.block, x, use_reentrant=self.reentrant))


def test_activation_checkpointing_of_either_kind_changes_nothing():
    def rows(reentrant):
        torch.manual_seed(0)
        report = probe_precision(Block(reentrant), (torch.randn(64, 16, requires_grad=True), torch.randn(64, 4)), F.mse_loss, 'fp16')
        return [(f.kind, f.op) for f in report.findings], len(report.rows) > 40
    assert rows(None) == rows(False) == rows(True) == ([], True)


@pytest.mark.parametrize('name', ['head', 'predict', 'cast', 'map_floats'])
def test_a_method_may_have_any_name(name):
    "The line is that of the user's method, also if one of ours is called so"
    class Net(nn.Module):
        def __init__(self): super().__init__(); self.f = nn.Linear(8, 8)
        def forward(self, x): return getattr(self, name)(self.f(x))
    def shifted(self, h):
        big = 2.**14
        return (h + big) - big
    setattr(Net, name, shifted)
    worst = probe_precision(Net(), (torch.randn(32, 8), torch.randn(32, 8)), F.mse_loss, 'bf16').worst
    assert worst.code == 'return (h + big) - big'


def test_a_scheme_has_one_name_in_any_case_or_is_a_dtype():
    torch.manual_seed(0)
    net, batch = nn.Linear(8, 4), (torch.randn(16, 8), torch.randn(16, 4))
    def errors(scheme): return [r.error for r in probe_precision(net, batch, F.mse_loss, scheme).rows]
    assert errors('bf16') == errors('BF16') == errors(torch.bfloat16) and errors('tensorwise') == errors(RECIPES['tensorwise'])
    assert max(errors('nvfp4')) > max(errors('tensorwise')) > max(errors('bf16')) > 0
    for bad in ('magic', torch.float64, [1]):
        with pytest.raises(ValueError, match='There is no scheme .* tensorwise'): probe_precision(net, batch, F.mse_loss, bad)


@pytest.mark.parametrize('product', [lambda x, w: torch.einsum('bi,io->bo', x, w), lambda x, w: torch.linalg.matmul(x, w), lambda x, w: torch.inner(x, w.T), lambda x, w: torch.tensordot(x, w, 1),
                                     lambda x, w: torch.stack([torch.mv(w.T, r) for r in x]), lambda x, w: torch.baddbmm(torch.zeros(1, 16, 4), x[None], w[None])[0], lambda x, w: x @ w,
                                     lambda x, w: F.linear(input=x, weight=w.T), lambda x, w: torch.nn.functional.bilinear(x, x, w.T[:, None].expand(4, 8, 8))])
def test_a_recipe_rounds_a_product_however_it_is_written_or_refuses(product):
    class Net(nn.Module):
        def __init__(self): super().__init__(); self.w = nn.Parameter(torch.randn(8, 4))
        def forward(self, x): return product(x, self.w)
    try: report = probe_precision(Net(), (torch.randn(16, 8), torch.randn(16, 4)), F.mse_loss, 'tensorwise')
    except ValueError as e: assert 'not converted to few bits' in str(e)
    else: assert max(r.error for r in report.rows) > .005


def test_a_tensor_is_no_batch():
    for batch in (torch.randn(2, 8), (torch.randn(2, 8),), None):
        with pytest.raises(TypeError, match=r'A batch is a pair \(inputs, targets\)'): probe_precision(nn.Linear(8, 4), batch, F.mse_loss)


# --- around any code ---

class Wide(nn.Module):
    "BatchNorm, dropout, attention and a buffer that moves"
    def __init__(self):
        super().__init__()
        self.inp, self.norm, self.drop = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(.2)
        self.att, self.out = nn.MultiheadAttention(16, 2, dropout=.1, batch_first=True), nn.Linear(16, 4)
        self.register_buffer('mean', torch.zeros(16))

    def forward(self, x):
        h = self.drop(self.norm(self.inp(x)).relu())
        with torch.no_grad(): self.mean.lerp_(h.mean(0).to(self.mean.dtype), .1)
        return self.out(self.att(h[:, None], h[:, None], h[:, None])[0][:, 0] + h - self.mean)


@pytest.mark.parametrize('weights, half', [(torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.bfloat16, None)])
def test_a_watched_step_is_the_same_bit_for_bit(weights, half):
    "Weights, buffers, optimizer state and random numbers"
    def train(watched):
        torch.manual_seed(0)
        net, (x, y) = Wide().to(weights), data()
        opt = torch.optim.AdamW(net.parameters(), 1e-2)
        report = sanitize(steps=[1, 3]) if watched else nullcontext()
        with report as report:
            for _ in range(4):
                with torch.autocast('cpu', half or torch.bfloat16, enabled=half is not None): pred = net(x.to(weights))
                opt.zero_grad()
                MSE(pred.float(), y).backward()
                opt.step()
        return report, [*net.state_dict().values(), *(t for s in opt.state.values() for t in s.values()), torch.get_rng_state()]
    (_, plain), (report, watched) = train(False), train(True)
    assert all(same_bits(a, b) for a, b in zip(plain, watched)) and report.steps == [1, 3] and report.rows


def test_steps_that_a_scaler_skips_are_steps():
    net, (x, y) = mlp(8, 16, 4), data()
    opt, scaler = torch.optim.SGD(net.parameters(), .1), torch.amp.GradScaler('cpu', 2.**40)
    with sanitize(every=3) as report:
        for _ in range(4):
            with torch.autocast('cpu', torch.float16): pred = net(x)
            opt.zero_grad()
            scaler.scale(MSE(pred.float(), y)).backward()
            scaler.step(opt)
            scaler.update()
    assert report.steps == [1, 4] and report.worst.kind == 'overflow' and report.worst.steps == [1, 4]


def test_only_the_modules_that_are_asked_for_get_rows():
    net, (x, _) = mlp(8, 16, 4), data()
    with sanitize(modules='2') as report, torch.autocast('cpu', torch.bfloat16): net(x)
    assert {r.module for r in report.rows} == {'2'} and report.rows[-1].error > 0


def test_an_exception_leaves_nothing_behind():
    with pytest.raises(KeyError), sanitize(): raise KeyError
    assert not torch._C._len_torch_dispatch_stack() and not nn.modules.module._global_forward_hooks
    for bad in (0, -1, 1.5):
        with pytest.raises(ValueError, match='every'): sanitize(every=bad).__enter__()


def test_what_it_says_is_json():
    "A finding's fields, as the table of chapter 84 lists them"
    found = json.loads(json.dumps(probe_precision(Offset(), data(), MSE, 'bf16 weights').to_dict()))
    assert found['schema'] == 'mpcourse.sanitizer/1' and found['steps'] == [1] and found['not_followed'] == []
    first = found['findings'][0]
    assert {'kind', 'file', 'line', 'code', 'module', 'error', 'carried', 'own', 'still', 'flushed', 'name', 'others', 'follows', 'steps', 'first_try', 'chapter'} <= set(first)
    assert first['code'] == 'high = h + self.offset' and (first['line'], first['chapter']) == (46, '30_offsets')
    table = probe_precision(Offset(), data(), MSE, 'bf16 weights').table(findings=True)
    assert table.kind[0] == 'a large offset'


def test_choices_that_fp32_would_have_made_differently_are_counted():
    "A router whose scores share 40"
    def choose(shared):
        torch.manual_seed(0)
        h, w = torch.randn(500, 16), torch.randn(16, 8)/8
        with sanitize() as report: ((h@w + shared).bfloat16()).argmax(-1)
        return [f for f in report.findings if f.kind == 'near ties']
    assert not choose(0.) and choose(40.)[0].error > .05 and 'of the choices differ' in str(choose(40.)[0])


def test_a_cast_that_is_emulated_is_followed():
    "Under a recipe, and under a format of our own; scales come from the first run"
    x = torch.randn(64, 64)
    with sanitize() as report: quantize(x, 'e4m3')@x
    assert [r.op for r in report.rows][0] == 'quantize' and .01 < report.rows[0].error < .1 and report.rows[-1].error > .01
    with sanitize() as report, emulate_format('e4m3', overflow='saturate'): x@x
    assert max(r.error for r in report.rows) > .01


def test_a_mask_that_overflows_counts_where_a_row_is_lost():
    lowest = torch.finfo(torch.float16).min
    def masked(pad):
        future = torch.full((4, 4), lowest).triu(1)
        with sanitize() as report: ((future + pad*lowest).half() + torch.zeros(4, 4).half()).softmax(-1)
        return report.worst
    assert masked(torch.tensor([1., 1, 0, 0])).kind == 'overflow' and 'mask' in str(masked(torch.tensor([1., 1, 0, 0])))
    assert masked(torch.tensor([0., 0, 0, 1.])) is None


def test_batch_norm_writes_its_averages_once():
    net = nn.BatchNorm1d(4, momentum=.5)
    with sanitize(), torch.autocast('cpu', torch.bfloat16): net(torch.ones(8, 4).bfloat16())
    assert net.running_mean.tolist() == [.5]*4 and net.num_batches_tracked == 1


def test_a_tool_is_no_users_line():
    import mpcourse.step, mpcourse.toys
    assert is_tool(torch.nn.functional.__file__) and is_tool(mpcourse.step.__file__)
    assert not is_tool(mpcourse.toys.__file__) and not is_tool(__file__)


@pytest.mark.parametrize('act', [F.silu, F.mish, F.gelu, F.softplus])
def test_an_op_that_has_a_kernel_is_not_taken_apart(act):
    "`silu_backward` is made of other ops, and has a kernel, too, which rounds otherwise"
    grads = []
    for context in (nullcontext(), sanitize()):
        x = torch.linspace(-3, 3, 1000).bfloat16().requires_grad_()
        with context: act(x).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_an_infinity_is_told_though_a_small_error_came_before_it():
    torch.manual_seed(0)
    h = (torch.randn(32, 64)*3e-4).requires_grad_()
    with sanitize() as report:
        var = (h.half()**2).mean(-1, keepdim=True)
        (h.half()*torch.rsqrt(var + 1e-8)).float().square().sum().backward()
    assert not h.grad.isfinite().all() and any(f.error == math.inf and not f.follows for f in report.findings)


def test_what_is_zero_but_for_rounding_is_no_fault():
    "A bias whose gradients cancel, over a batch and between its uses"
    for k in range(3):
        torch.manual_seed(k)
        net, x = nn.Linear(16, 16), torch.randn(64, 16)
        with sanitize() as report:
            with torch.autocast('cpu', torch.bfloat16): a, p, b = (net(v).float() for v in (x, x + .2*torch.randn_like(x), x.roll(1, 0)))
            ((a - p).square().sum(1) - (a - b).square().sum(1) + 20).relu().mean().backward()
        assert not report.findings


def test_the_op_is_blamed_and_not_a_cast_before_it_that_hurts_little():
    torch.manual_seed(0)
    y = torch.randn(64, 1)*.1 - 8
    with sanitize() as report:
        z = y.bfloat16()
        torch.log(1 + z.exp())
    assert report.worst.kind == 'a large offset' and report.worst.code == 'torch.log(1 + z.exp())'


def test_zeros_are_an_underflow_and_do_not_stand_still():
    torch.manual_seed(0)
    moves, seen = torch.randn(12, 12).softmax(1).half(), torch.randn(12, 16).softmax(0).half()
    with sanitize() as report:
        share = torch.full((16, 12), 1/12).half()
        for _ in range(22): share = (share@moves)*seen.T
    assert report.worst.kind == 'underflow'


def test_a_merge_that_does_not_move_a_weight_is_told():
    class Merged(nn.Module):
        def __init__(self): super().__init__(); torch.manual_seed(0); self.base, self.delta = nn.Linear(16, 16, bias=False).bfloat16(), nn.Parameter(torch.randn(16, 16).bfloat16()*1e-4)
        def forward(self, x): return F.linear(x, self.base.weight + self.delta)
    with sanitize() as report: Merged()(torch.randn(4, 16).bfloat16())
    assert (report.worst.kind, report.worst.name) == ('stands still', 'base.weight')


def test_second_derivatives_have_lines():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), torch.randn(32, 8, requires_grad=True)
    with sanitize() as report:
        with torch.autocast('cpu', torch.float16): u = net(x).float()
        slope, = torch.autograd.grad(u.sum()*1e-6, x, create_graph=True)
        slope.square().sum().backward()
    assert report.findings and all(f.where for f in report.findings) and all(r.place[1] for r in report.rows)


def bf16(): return torch.autocast('cpu', torch.bfloat16)

def of_samples(net, x):
    def loss(p, v):
        with bf16(): return torch.func.functional_call(net, p, (v[None],)).float().square().mean()
    return torch.func.vmap(torch.func.grad(loss), (None, 0))({n: p.detach() for n, p in net.named_parameters()}, x)

def tangents(net, x):
    with bf16(): return torch.func.jvp(lambda v: net(v).float().tanh(), (x,), (torch.ones_like(x),))

def frequencies(net, x):
    with bf16(): y = net(x)
    torch.fft.rfft(y.float()).abs().mean().backward()

def sparse(net, x):
    emb = nn.Embedding(50, 8, sparse=True)
    opt = torch.optim.SparseAdam(emb.parameters())
    with bf16(): y = net(emb(torch.arange(16)))
    y.float().square().mean().backward()
    opt.step()

def ragged(net, x):
    with bf16(): net(torch.nested.nested_tensor([x[:3], x[:5]], layout=torch.jagged))

def without_memory(net, x): nn.Linear(8, 4, device='meta')(torch.empty(2, 8, device='meta').bfloat16().float())

def looking_for_a_line(net, x):
    opt = torch.optim.LBFGS(net.parameters(), max_iter=3)
    def closure():
        opt.zero_grad()
        with bf16(): loss = net(x).float().square().mean()
        loss.backward()
        return loss
    opt.step(closure)

def as_integers(net, x):
    low = x.bfloat16()
    low.view(torch.int16).add_(1)
    return low + 1

def nothing(net, x): return torch.zeros(0, 8).bfloat16()@torch.randn(8, 4).bfloat16()

def into_a_buffer(net, x): torch.mm(x.bfloat16(), torch.randn(8, 4).bfloat16(), out=torch.empty(16, 4, dtype=torch.bfloat16))


@pytest.mark.parametrize('f', [of_samples, tangents, frequencies, sparse, ragged, without_memory, looking_for_a_line, as_integers, nothing, into_a_buffer], ids=lambda f: f.__name__)
def test_what_is_not_a_plain_tensor_is_followed_or_told(f):
    torch.manual_seed(0)
    with sanitize() as report: f(nn.Linear(8, 4), torch.randn(16, 8))
    assert not report.findings and (report.rows or f is without_memory)
    if f is frequencies: assert 'were not followed: _fft_r2c, complex numbers have no shadow' in str(report)


def test_another_phase_with_another_optimizer_is_counted():
    net, kept, (x, y) = mlp(8, 16, 4), [], data()
    with sanitize() as report:
        for lr in (.1, .01):
            opt = torch.optim.SGD(net.parameters(), lr)
            kept.append(opt)                        # both live
            for _ in range(3):
                with torch.autocast('cpu', torch.bfloat16): pred = net(x)
                opt.zero_grad()
                MSE(pred.float(), y).backward()
                opt.step()
    assert len(report.steps) == 5           # the second one's first step is not known to be a phase


def test_the_users_stance_on_compiling_comes_back():
    torch._dynamo.decorators.set_stance('eager_on_recompile')
    try:
        with sanitize(): pass
        assert torch._dynamo.eval_frame._stance.stance == 'eager_on_recompile'
    finally: torch._dynamo.decorators.set_stance('default')


def test_a_users_folder_may_be_called_as_a_package():
    for name in ('accelerate', 'lightning', 'mpcourse', 'fastai'): assert not is_tool(f'/home/me/{name}/train.py')
    assert is_tool('/x/lib/python3.11/site-packages/accelerate/accelerator.py')


def test_a_fault_of_the_tool_ends_no_run(monkeypatch):
    import mpcourse.lockstep as module
    def broken(*args): raise ZeroDivisionError('mine')
    monkeypatch.setattr(module, 'numbers', broken)
    net, (x, _) = mlp(8, 16, 4).bfloat16(), data()
    with sanitize(): out = net(x.bfloat16())
    assert out.isfinite().all() and not nn.modules.module._global_forward_hooks


# --- what a stranger broke ---

@pytest.mark.parametrize('sign', [1, -1])
def test_an_overflow_is_one_on_either_side_of_zero(sign):
    x = torch.linspace(1, 300, 3000).half()
    with sanitize() as report: x*(300*sign)
    assert [f.kind for f in report.findings] == ['overflow']
    layer = nn.Linear(4, 8).half()
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[0], layer.bias[0] = 100.*sign, 100.*sign
    with torch.no_grad(), sanitize() as report: layer(torch.full((3, 4), 300.).half()).pow(2).mean()
    assert report.worst.op == 'addmm' and report.worst.kind == 'overflow'


def test_an_infinity_in_the_line_of_a_state_that_stands_still():
    s, d, a = (torch.full((1000,), v).half() for v in (1., 4e-4, 300.))
    with sanitize() as report:
        for _ in range(600): s, _ = s + d, a*300
    assert {f.kind for f in report.findings} == {'stands still', 'overflow'}


@pytest.mark.parametrize('scaler', [torch.amp.GradScaler, GradScaler])
def test_a_step_that_a_scaler_skips_is_a_step(scaler):
    w = torch.ones(3, requires_grad=True)
    opt, sc = torch.optim.SGD([w], .1), scaler('cpu')
    with sanitize() as report:
        for factor in (1., torch.inf, 1., 1.):
            opt.zero_grad()
            sc.scale((w.half()*factor).float().sum()).backward()
            sc.step(opt)
            sc.update()
    assert report.steps == [1, 2, 3, 4]


def test_a_cast_of_a_step_that_is_not_looked_at_has_no_row():
    w = torch.ones(8, requires_grad=True)
    opt = torch.optim.SGD([w], .1)
    with sanitize(steps=[3]) as report:
        for i in range(4):
            opt.zero_grad()
            if i < 2: quantize(w.detach(), 'e4m3')
            w.sum().backward()
            opt.step()
    assert report.steps == [3] and 'quantize' not in {r.op for r in report.rows}


def test_ops_that_take_functions_run():
    x = torch.ones(3)
    with sanitize() as report:
        out = torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))
        out.bfloat16()*3
    assert out.tolist() == [2, 2, 2] and 'cond' in str(report.lost)


def test_choices_outside_of_the_modules_have_no_row():
    a, b = torch.randn(2, 1000).bfloat16()
    with sanitize(modules='encoder') as report: (a + b*.01) > (a - b*.01)*1.001
    assert not report.rows and not report.findings
