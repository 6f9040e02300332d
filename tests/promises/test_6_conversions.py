"Promise 6: every conversion (half precision, unit scaling, FP8) converts or names what it did not convert"
import copy, math

import pytest, torch, torch.nn.functional as F
from torch import nn

import adapter as A

H, B = torch.float16, torch.bfloat16


def net(norm=nn.LayerNorm):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), norm(32), nn.GELU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def x(n=64, d=8): return torch.randn(n, d, generator=torch.Generator().manual_seed(1))
def error(a, b): return ((a.float() - b.float()).norm()/b.float().norm()).item()


# --- half precision ---

@pytest.mark.parametrize('dtype', (H, B))
def test_half_casts_all_but_norms_and_computes_nearly_the_same(dtype):
    want, model = net()(x()), A.convert('half', net(), dtype)
    kinds = {n: p.dtype for n,p in model.named_parameters()}
    assert kinds == {n: torch.float32 if n.startswith('1.') else dtype for n in kinds}
    assert 0 < error(model(x().to(dtype)), want) < (5e-3 if dtype is H else 4e-2)
    back = A.convert('float', model)
    assert all(p.dtype == torch.float32 for p in back.parameters()) and error(back(x()), want) < (5e-3 if dtype is H else 4e-2)


class OwnNorm(nn.Module):
    "Written by hand, known by its name"
    def __init__(self, n): super().__init__(); self.weight = nn.Parameter(torch.ones(n))
    def forward(self, v): return v/v.square().mean(-1, keepdim=True).sqrt()*self.weight


@pytest.mark.parametrize('norm', (nn.BatchNorm1d, nn.LayerNorm, nn.RMSNorm, lambda n: nn.GroupNorm(4, n), OwnNorm))
def test_a_norm_computes_in_fp32(norm):
    "Inputs of 3,000: squares beyond FP16"
    model = A.convert('half', nn.Sequential(norm(32), nn.Linear(32, 4)))
    v = x(16, 32)*3000
    out = model(v.half())
    want = A.convert('float', copy.deepcopy(model))(v.half().float())
    assert out.isfinite().all() and error(out, want) < 5e-3
    assert all(t.dtype == torch.float32 for t in (*model[0].parameters(), *model[0].buffers()) if t.is_floating_point())


@pytest.mark.parametrize('make', (lambda: nn.ReLU(), lambda: nn.LazyLinear(3)))
def test_half_refuses_what_it_cannot_convert(make):
    with pytest.raises(ValueError): A.convert('half', make())
def test_half_refuses_other_dtypes_and_no_models():
    with pytest.raises(ValueError, match='float64'): A.convert('half', net(), torch.float64)
    with pytest.raises(TypeError): A.convert('half', 'model')


def test_a_tensor_of_a_norm_and_of_another_layer_is_named():
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4, bias=True)); model[1].bias = model[0].bias
    with pytest.raises(ValueError, match='1.bias'): A.convert('half', model)


def test_a_half_model_trains_with_masters_as_the_step_does():
    "Updates that half weights would swallow are kept"
    for flat in (False, True):
        t, lr = A.toy('deep_sigmoid', steps=6), 1e-6
        u = copy.deepcopy(t.model)
        groups, masters = A.convert('masters', [list(t.model.parameters())], flat)
        A.convert('half', t.model)
        make = lambda ps: torch.optim.SGD(ps, lr=lr, momentum=.9)
        step = A.make_step(A.make_scaler('static', init_scale=2.**11), masters=(groups, masters, flat))
        A.train(step, t.model, t.batches, make(masters[0]), t.loss_func)
        A.train(A.make_step(A.make_scaler('static', init_scale=2.**11)), u, t.batches, make(u.parameters()), t.loss_func)
        got = torch.cat([m.detach().flatten() for m in masters[0]]); want = torch.cat([p.detach().flatten() for p in u.parameters()])
        assert torch.equal(got, want), f'flat={flat}'
        assert all(torch.equal(p, q.half()) for p,q in zip(t.model.parameters(), u.parameters()))


class Rotary(nn.Module):
    "Angles are position times frequency: a frequency rounded to half is wrong by one part in 2,000, an angle of 2,000 by one"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(64, 4)
        self.register_buffer('inv_freq', 1e4**(-torch.arange(0, 64, 2)/64), persistent=False)
    def forward(self, v):
        angle = torch.arange(len(v), device=v.device).float()[:, None]*self.inv_freq.float()
        return self.lin(torch.cat([angle.cos(), angle.sin()], 1).to(v.dtype))


@pytest.mark.parametrize('how', ('half', 'step'))
def test_rotary_positions_are_right_at_2048(how):
    v, seen, model = torch.zeros(2048, 64), [], Rotary()
    want = model(v)
    if how == 'half': seen.append(A.convert('half', Rotary())(v.half()))
    else:
        def loss(out, y): seen.append(out.detach().float()); return out.square().mean()
        A.make_step(A.make_scaler('static', init_scale=16.))(model, v, None, torch.optim.SGD(model.parameters(), lr=0.), loss)
    assert error(seen[0], want) < .02


@pytest.mark.parametrize('how', ('half', 'step'))
def test_an_fp32_buffer_meets_half_numbers(how):
    "The product of the two is FP32, and the next layer's weights are half"
    class Gain(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.w = nn.Parameter(torch.randn(4, 8)); self.register_buffer('gain', torch.linspace(.9, 1.1, 8))
        def forward(self, v): return F.linear(v*self.gain, self.w)
    seen, model = [], Gain()
    want = model(x())
    if how == 'half': seen.append(A.convert('half', Gain())(x().half()))
    else:
        def loss(out, y): seen.append(out.detach().float()); return out.square().mean()
        A.make_step(A.make_scaler('static', init_scale=16.))(model, x(), None, torch.optim.SGD(model.parameters(), lr=0.), loss)
    assert 0 < error(seen[0], want) < 5e-3 and model.gain.dtype == torch.float32


def test_a_transformer_with_a_padding_mask_evaluates():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2).eval()
    mask = torch.zeros(4, 10, dtype=torch.bool); mask[:, 7:] = True
    v = x(40, 32).view(4, 10, 32)
    with torch.no_grad():
        want = model(v, src_key_padding_mask=mask)
        got = A.convert('half', model)(v.half(), src_key_padding_mask=mask)
    assert error(got[:, :7], want[:, :7]) < .02


@pytest.mark.parametrize('dtype', (torch.float64, B))
def test_a_wide_or_bf16_model_with_a_norm_is_stepped_or_refused(dtype):
    model = net().to(dtype)
    step, opt = A.make_step(A.make_scaler('static', init_scale=16.)), torch.optim.SGD(model.parameters(), lr=.1)
    try: step(model, x().to(dtype), torch.zeros(64, dtype=torch.int64), opt, F.cross_entropy)
    except (ValueError, TypeError): return
    assert all(p.dtype == dtype and p.isfinite().all() for p in model.parameters()) and dtype != B


def test_back_to_fp32_nothing_is_left():
    model = A.convert('float', A.convert('half', nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 2))))
    assert model(x()).dtype == torch.float32 and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_weights_that_a_forward_changes_keep_all_digits():
    "Written to in one place, within a batch: the other entries are not rounded"
    class Count(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 2); self.register_buffer('seen', torch.tensor([1/3, 1/7, 0.]))
        def forward(self, v): self.seen[2] += 1; return self.lin(v)
    model = Count(); opt = torch.optim.SGD(model.parameters(), lr=.1)
    A.make_step(A.make_scaler('static', init_scale=4.))(model, torch.ones(2, 3), torch.zeros(2, dtype=torch.int64), opt, F.cross_entropy)
    assert torch.equal(model.seen, torch.tensor([1/3, 1/7, 1.]))


# --- unit scaling ---

def test_unit_scaling_makes_outputs_and_gradients_of_unit_scale():
    torch.manual_seed(1)
    model = A.convert('unit', nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 128)), constraint='none')
    assert all(.9 < p.std() < 1.1 for p in model.parameters() if p.dim() > 1)
    v = torch.randn(512, 256, requires_grad=True); out = model(v)
    out.backward(torch.randn(512, 128))
    for t in (out, v.grad, model[0].weight.grad, model[2].weight.grad): assert .8 < t.std() < 1.25, t.std()


def test_the_unit_scaled_model_is_the_models_function_and_has_its_directions():
    "A chain: the same output times a number, gradients times numbers"
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 5))
    for p in plain.parameters():
        if p.dim() == 1: nn.init.zeros_(p)
    unit = A.convert('unit', plain)
    v = torch.randn(64, 16)
    a, b = plain(v), unit(v)
    a.square().sum().backward(); b.square().sum().backward()
    for s,t in ((a, b), *((p.grad, q.grad) for p,q in zip(plain.parameters(), unit.parameters()))):
        assert F.cosine_similarity(s.flatten(), t.flatten(), 0) > 1 - 1e-5
    assert all(F.cosine_similarity(p.flatten(), q.flatten(), 0) > 1 - 1e-5 for p,q in zip(plain.parameters(), unit.parameters()) if p.dim() > 1)


@pytest.mark.parametrize('layer, n', ((lambda: nn.Conv2d(16, 32, 3, padding=1), 0), (lambda: nn.Linear(16, 64), 1), (lambda: nn.LayerNorm(16), 1),
                                      (lambda: nn.Softmax(-1), 1), (nn.ReLU, 1), (nn.GELU, 1), (nn.SiLU, 1), (nn.Tanh, 1)))
def test_each_op_is_unit_forward_and_backward(layer, n):
    torch.manual_seed(2)
    m = A.convert('unit', nn.Sequential(layer()), constraint='none')
    near = .03 if isinstance(m[0], (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh)) else .25
    v = torch.randn((4096, 16) if n else (32, 16, 8, 8), requires_grad=True)
    out = m(v); out.backward(torch.randn_like(out))
    for t in (out, v.grad): assert 1 - near < t.std() < 1 + near, t.std()


class Own(nn.Module):
    def __init__(self): super().__init__(); self.w = nn.Parameter(torch.ones(3))
    def forward(self, v): return v*self.w


@pytest.mark.parametrize('make, name', ((lambda: nn.Sequential(nn.Linear(3, 3), Own()), 'Own'), (lambda: nn.Sequential(nn.LSTM(3, 3)), 'LSTM'),
                                        (lambda: nn.Sequential(nn.Linear(3, 3), nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))), '1')))
def test_unit_scaling_names_what_it_does_not_know_and_changes_nothing(make, name):
    model = make(); before = [p.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=name): A.convert('unit', model)
    assert all(map(torch.equal, before, model.parameters()))


# --- FP8 ---

@pytest.mark.parametrize('recipe', ('current', 'delayed', 'mx'))
def test_fp8_rounds_every_product_a_little(recipe):
    want, model = net()(x()), A.convert('fp8', net(), recipe)
    for _ in range(2): out = model(x())
    assert .005 < error(out, want) < .1
    out.square().sum().backward()
    plain = net(); plain(x()).square().sum().backward()
    for p,q in zip(model.parameters(), plain.parameters()): assert error(p.grad, q.grad) < .4


def test_operands_fill_the_range_of_their_format():
    "One product by hand: x and w to E4M3 at 448/amax, the gradient to E5M2 at 57344/amax"
    torch.manual_seed(3)
    lin = nn.Linear(32, 16, bias=False); v = x(8, 32).requires_grad_()
    def q(t, fmt, top):
        s = torch.full_like(t.abs().max(), top)/t.abs().max()
        return A.convert('quantize', t*s, fmt, overflow='saturate')/s
    model = A.convert('fp8', nn.Sequential(lin), 'current')
    out = model(v); g = torch.randn(8, 16); out.backward(g)
    a, b = q(v.detach(), 'e4m3', 448.), q(lin.weight.detach(), 'e4m3', 448.)
    c = q(g, 'e5m2', 57344.)
    assert error(out.detach(), a@b.T) < 1e-5 and error(v.grad, c@b) < 1e-5 and error(model[0].weight.grad, c.T@a) < 1e-5
    assert error(out.detach(), v.detach()@lin.weight.detach().T) > .005


def test_delayed_scales_follow_the_largest_of_the_last_steps():
    "A spike saturates once and is remembered; after the history it is forgotten"
    model = A.convert('fp8', nn.Sequential(nn.Linear(16, 16, bias=False)), 'delayed')
    errors = []
    for k in (1., 1., 64., 64., 1.):
        v = x(32, 16)*k
        errors.append(error(model(v).detach(), F.linear(v, model[0].weight).detach()))
    assert errors[1] < .1 < errors[2] and errors[3] < .1


@pytest.mark.parametrize('make, name', ((lambda: nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4)), '1'), (lambda: nn.Sequential(nn.Bilinear(4, 4, 4)), '0')))
def test_fp8_names_what_it_does_not_convert(make, name):
    with pytest.raises(ValueError, match=name): A.convert('fp8', make(), 'current')
def test_fp8_names_a_product_that_it_does_not_know_when_it_is_called():
    class Odd(nn.Module):
        def forward(self, v): return torch.linalg.multi_dot([v, v.T, v])
    with pytest.raises(ValueError, match='0'): A.convert('fp8', nn.Sequential(Odd()), 'current')(x())


# --- rounding itself: a conversion of numbers ---

@pytest.mark.parametrize('fmt, e, m', (('fp16', -14, 10), ('bf16', -126, 7), ('e4m3', -6, 3), ('e5m2', -14, 2), ('e3m2', -2, 2)))
def test_numbers_go_to_the_nearest_and_ties_to_even(fmt, e, m):
    for k in (0, 3, e):
        ulp = 2.**(k - m)
        v = 2.**k + torch.arange(8).float()*ulp/4
        want = 2.**k + torch.tensor([0., 0., 0., 1., 1., 1., 2., 2.])*ulp          # .25 down, .5 to even, .75 up, 1.5 to even
        assert torch.equal(A.convert('quantize', v, fmt).float(), want), (fmt, k)
    assert torch.equal(A.convert('quantize', torch.tensor([2.**(e - m - 1)*1.01, 2.**(e - m - 1)]), fmt).float(), torch.tensor([2.**(e - m), 0.]))
    assert math.copysign(1, A.convert('quantize', torch.tensor(-0.), fmt).item()) == -1
