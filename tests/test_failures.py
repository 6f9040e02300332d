"Each failure of chapter 04 against brute force, and its negative: without the cause, no failure"
import math

import numpy as np, pytest, torch
from mpcourse.formats import e4m3, e5m2, fp16, get_format
from mpcourse.failures import (adam_eps, adam_first_step, exploded_activations, flushed, gradients, scale_report, store_in, swallowed,
                               swallowed_updates, textbook_cross_entropy, until_bad, vanished_gradients)
from mpcourse.tensorcore import fp32_accumulate
import mpcourse.zoo  # noqa: F401
from mpcourse.toys import TOYS, batches, get_toy, half_pass, plain_step, relu_mlp, train_toy

pytestmark = pytest.mark.library
half, bfloat, GUESS = torch.float16, torch.bfloat16, math.log(10)


# swallowed updates

@pytest.mark.parametrize('dtype', [half, bfloat, torch.float32])
def test_swallowed_against_brute_force(dtype):
    gen = torch.Generator().manual_seed(0)
    w = torch.randn(400, generator=gen).to(dtype)
    u = torch.randn(400, generator=gen) * 2.**torch.randint(-30, 2, (400,), generator=gen)
    u[::7] = 0
    same = live = 0
    for a, b in zip(w, u):
        if b == 0: continue
        live += 1
        same += float(torch.tensor(a.item() + b.item(), dtype=dtype)) == a.item()     # Python floats are doubles
    assert 0 < same < live and swallowed(w, u) == same / live


@pytest.mark.parametrize('dtype, bits', [(half, 10), (bfloat, 7)])
def test_half_a_step_is_the_edge(dtype, bits):
    one, two = torch.ones(1, dtype=dtype), torch.tensor([1 + 2.**-bits], dtype=dtype)
    edge = 2.**-(bits + 1)
    assert swallowed(one, torch.tensor([edge])) == 1 and swallowed(one, torch.tensor([edge * 1.01])) == 0
    assert swallowed(two, torch.tensor([edge])) == 0                  # the tie goes to the even neighbour, away from an odd one
    assert swallowed(one, torch.tensor([-edge / 2])) == 1 and swallowed(one, torch.tensor([-edge / 2 * 1.01])) == 0


def test_no_update_is_no_swallowed_update():
    assert swallowed(torch.ones(3, dtype=half), torch.zeros(3)) == 0 == swallowed(torch.ones(0), torch.zeros(0))
    assert swallowed(torch.zeros(3, dtype=half), torch.full((3,), 1e-7)) == 0       # nothing to be swallowed by


def test_store_in_keeps_weights_on_the_grid_and_counts():
    m = relu_mlp()
    opt = torch.optim.SGD(m.parameters(), lr=1e-3)
    xb, yb = next(batches(get_toy('relu_mlp').data(device='cpu'), 32, 1))
    loss_func = get_toy('relu_mlp').loss_func
    twin = relu_mlp()
    with torch.no_grad():
        for p in twin.parameters(): p.copy_(p.half())
    before = [p.detach().half() for p in twin.parameters()]
    plain_step(twin, xb, yb, torch.optim.SGD(twin.parameters(), lr=1e-3), loss_func)
    rec = store_in(half)(m, xb, yb, opt, loss_func)
    ws, us = torch.cat([b.flatten() for b in before]), torch.cat([(p.detach() - b.float()).flatten() for p, b in zip(twin.parameters(), before)])
    assert all(torch.equal(p, q.half().float()) for p, q in zip(m.parameters(), twin.parameters()))
    assert abs(rec['swallowed'].item() - swallowed(ws, us)) < 2e-3 and .1 < rec['swallowed'] < 1


def test_store_in_fp32_is_the_plain_step():
    a, b = (train_toy('relu_mlp', s, steps=5) for s in (plain_step, store_in(torch.float32)))
    assert a.history['loss'] == b.history['loss'] and b.history['swallowed'] == [0] * 5


@pytest.mark.sweep(3)
@pytest.mark.parametrize('seed', [0, 1])
def test_swallowed_updates_stop_a_slow_training(seed):
    runs = {d: swallowed_updates(d, seed=seed) for d in (torch.float32, half, bfloat)}
    share = {d: np.mean(r.history['swallowed']) for d, r in runs.items()}
    assert runs[torch.float32].acc > .7 and runs[half].acc < .5 and runs[bfloat].acc < .3
    assert share[torch.float32] == 0 and .8 < share[half] < .95 and share[bfloat] > .98


def test_without_small_steps_nothing_is_lost():
    runs = [swallowed_updates(d, lr=3e-3, steps=400) for d in (torch.float32, half, bfloat)]
    assert all(r.acc > .93 for r in runs)


@pytest.mark.sweep(0)
@fp32_accumulate()
def test_a_step_of_ones_own_replaces_the_failure():
    def step(model, xb, yb, opt, loss_func):
        "Weights in FP16 for the pass, FP32 between the steps: a master copy in two lines"
        return half_pass()(model, xb, yb, opt, loss_func)
    assert swallowed_updates(half, step=step).acc > .7
    assert vanished_gradients(step=half_pass(scale=2.**11)).loss < 1.6
    assert exploded_activations(loss_in=torch.float32, step=plain_step).acc > .9
    assert adam_eps(step=plain_step, dtype=torch.float32).acc > .9


# vanished gradients

def test_flushed_against_brute_force():
    g = torch.tensor([2.**-25, 2.**-25 * 1.0001, -2.**-26, 2.**-24, 0., 1., -0.])
    kept = [x for x in g.tolist() if x != 0]
    assert flushed(g, g.half()) == sum(np.float16(x) == 0 for x in kept) / len(kept) == 2/5
    assert flushed(torch.zeros(3), torch.zeros(3)) == 0 and flushed(g, g) == 0
    assert flushed(g, g.bfloat16()) == 0


@pytest.mark.parametrize('name', TOYS)
def test_gradients_leave_the_model_and_are_autograds(name):
    toy = get_toy(name)
    m = toy.model(seed=0, device='cpu')
    before = [p.detach().clone() for p in m.parameters()]
    got = gradients(name, model=m)
    assert all(torch.equal(p, q) for p, q in zip(m.parameters(), before))
    loss = toy.loss_func(m(*xb) if isinstance((xb := next(batches(toy.data(device='cpu'), toy.bs, 1))[0]), tuple) else m(xb),
                         next(batches(toy.data(device='cpu'), toy.bs, 1))[1])
    want = torch.autograd.grad(loss, list(m.parameters()))
    assert all(torch.allclose(got[n], g, atol=1e-6, rtol=1e-4) for (n, _), g in zip(m.named_parameters(), want))


def test_an_overflowing_scale_leaves_the_weights():
    m = get_toy('deep_sigmoid').model(seed=0, device='cpu')
    before = [p.detach().clone() for p in m.parameters()]
    got = gradients('deep_sigmoid', half, 2.**24, model=m)
    assert not all(g.isfinite().all() for g in got.values())
    assert all(torch.equal(p, q) for p, q in zip(m.parameters(), before))


@pytest.mark.parametrize('seed', [0, 1, 2])
def test_where_gradients_vanish(seed):
    g32, g16, gbf = (gradients('deep_sigmoid', d, seed=seed) for d in (torch.float32, half, bfloat))
    scaled = gradients('deep_sigmoid', half, 2.**14, seed=seed)
    ws = [n for n in g32 if n.endswith('weight')]
    rms = [g32[n].pow(2).mean().sqrt().log2().item() for n in ws]
    assert all(1.5 < b - a < 5 for a, b in zip(rms, rms[1:]))                 # about three octaves per layer
    assert flushed(g32[ws[0]], g16[ws[0]]) > .95 > .05 > flushed(g32[ws[0]], scaled[ws[0]])
    assert flushed(g32[ws[-1]], g16[ws[-1]]) < .01 and flushed(g32[ws[0]], gbf[ws[0]]) == 0


@pytest.mark.sweep(0)
@fp32_accumulate()
def test_only_the_low_end_of_fp16_is_to_blame():
    assert abs(vanished_gradients().loss - GUESS) < .02
    assert vanished_gradients(dtype=bfloat).loss < 1.6
    assert vanished_gradients(toy='relu_mlp').loss < .1 and vanished_gradients(2.**-13, toy='relu_mlp').loss < .2


def test_a_scale_too_large_ends_the_run():
    run = vanished_gradients(2.**24)
    assert math.isnan(run.loss) and len(run.history['loss']) < 10


def test_until_bad():
    assert [until_bad(0, {'loss': torch.tensor(v)}) for v in (1., math.inf, math.nan)] == [False, True, True]


@pytest.mark.parametrize('fmt', [fp16, e5m2, get_format('bf16')])
@pytest.mark.parametrize('k', [-6, 0, 5, 14, 40])
def test_scale_report_is_what_a_cast_does(fmt, k):
    g = torch.cat([torch.tensor([2.**-25, 2.**-25 * 1.01, 65504., 65519., 65520., 2.**-17, 57344., 61439., 61440., 0., 3.]),
                   torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 2.**torch.arange(-40, 10).repeat(20)])
    low = (g.double() * 2.**k).float().to(fmt.dtype).float()
    live = (g != 0).sum().item()
    under, over = scale_report(g, k, fmt.name)
    assert under == pytest.approx(flushed(g, low)) and over == pytest.approx(low.isinf().sum().item() / live)


def test_scale_report_bad_input():
    with pytest.raises(ValueError, match='no non-zero gradient'): scale_report(torch.zeros(3), 0)
    with pytest.raises(ValueError): scale_report(torch.ones(3), 0, 'fp17')
    assert scale_report(torch.tensor([448., 463.9, 464., 2.**-11]), 0, e4m3)[1] in (.25, .5)


# explosions

def test_textbook_loss_is_right_where_it_does_not_overflow():
    pred, y = torch.randn(20, 10, generator=torch.Generator().manual_seed(0)) * 3, torch.arange(20) % 10
    assert torch.allclose(textbook_cross_entropy(pred, y), torch.nn.functional.cross_entropy(pred, y), atol=1e-5)
    edge = math.log(65520)
    finite = [textbook_cross_entropy(torch.tensor([[z, -20.]], dtype=half), torch.tensor([0])).isfinite().item() for z in (edge - .05, edge + .05)]
    assert finite == [True, False]


@pytest.mark.sweep(3)
@pytest.mark.parametrize('seed', [0, 1])
def test_explosions_and_their_negatives(seed):
    bad = exploded_activations(seed=seed)
    assert not math.isfinite(bad.loss) and 10 < len(bad.history['loss']) < 150
    for good in (exploded_activations(torch.float32, seed=seed), exploded_activations(bfloat, seed=seed),
                 exploded_activations(torch.float32, dtype=torch.float32, seed=seed),
                 exploded_activations(loss=torch.nn.functional.cross_entropy, seed=seed)):
        assert good.acc > .85 and len(good.history['loss']) == 400


# Adam

@pytest.mark.parametrize('kw', [{}, {'foreach': True}])
def test_adam_in_half_writes_infinity(kw):
    assert adam_first_step(**kw)['weight'] == -math.inf and adam_first_step(-1e-3, **kw)['weight'] == math.inf
    assert math.isnan(adam_first_step(0., **kw)['weight'])


@pytest.mark.parametrize('dtype, grad, weight', [(torch.float32, 1e-3, .999), (torch.float32, 0., 1.), (torch.float32, 1e-5, .999),
                                                 (bfloat, 1e-3, 1.), (half, 1e-2, .999)])
def test_adam_elsewhere_does_not(dtype, grad, weight):
    assert adam_first_step(grad, dtype=dtype)['weight'] == pytest.approx(weight, abs=1e-3)


def test_where_the_second_moment_is_zero():
    edge = math.sqrt(2.**-25 / .001)
    assert adam_first_step(edge * .98)['v'] == 0 < adam_first_step(edge * 1.02)['v']
    fused = adam_first_step(fused=True)
    assert fused['v'] == 0 and fused['weight'] == pytest.approx(.999, abs=1e-3)


def test_epsilon_in_half():
    assert torch.tensor(1e-8, dtype=half) == 0 < torch.tensor(1e-7, dtype=half)
    assert -math.inf < adam_first_step(eps=1e-7)['weight'] < -5
    errors = [abs(adam_first_step(eps=e)['weight'] - .999) for e in (1e-7, 1e-6, 1e-5, 1e-4)]
    assert errors == sorted(errors, reverse=True)


def test_a_whole_training_in_half_with_adam():
    dead, alive, wide = adam_eps(), adam_eps(1e-4), adam_eps(dtype=torch.float32)
    assert not math.isfinite(dead.loss) and len(dead.history['loss']) < 5 and next(dead.model.parameters()).dtype == half
    assert alive.acc > .9 and wide.acc > .9
