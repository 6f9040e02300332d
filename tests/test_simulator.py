"""Traces against real casts and real observations, storms, and replays against the scalers themselves."""
import copy, math

import pytest, torch
from hypothesis import given, settings, strategies as st

from mpcourse.dynamic import DynamicScaler
from mpcourse.formats import same_bits
from mpcourse.plots import log2_hist
from mpcourse.policies import POLICIES, RULES, follow_rule, get_policy
from mpcourse.rounding import quantize
from mpcourse.scaler import StaticScaler
from mpcourse.simulator import (Recording, flush_share, trace_from_hists, overflow_burst, named_policies, observe,
                                overflows, plot_result, random_burst, record_trace, replay, trace_from_bits, burst_of)
from mpcourse.step import StepController, MixedStep
from mpcourse.toys import plain_step, train_toy

pytestmark = pytest.mark.library
INF, NAN = math.inf, math.nan


def normal(n=2000, octave=-12., spread=5., seed=0):
    g = torch.randn(n, 2, generator=torch.Generator().manual_seed(seed)).double()
    return (g[:, 0].sign()*2.**(octave + spread*g[:, 1])).float()


def trace_of(g, name='one'): return trace_from_hists(name, [g.abs().max().item()], [log2_hist(g)])


# --- what a trace knows ---


@pytest.mark.parametrize('seed', range(3))
def test_a_trace_answers_like_a_cast(seed):
    "Exact at powers of two: overflow, and the share flushed"
    g = torch.cat([normal(seed=seed), torch.zeros(7)]); one = trace_of(g); live = (g != 0).sum().item()
    for k in range(-40, 60, 3):
        cast = quantize(g.double()*2.**k, 'fp16', overflow='inf')
        assert overflows(one, 2.**k).tolist() == [bool(cast.isinf().any())]
        assert flush_share(one, 2.**k)[0].item() == pytest.approx(((cast == 0) & (g != 0)).sum().item()/live, abs=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.floats(-45, 45), st.integers(0, 5))
def test_between_powers_of_two_it_interpolates(k, seed):
    "An octave holds the error: the true share lies between those of the neighbouring powers of two, and so does ours"
    one, lo, hi = trace_of(normal(seed=seed)), math.floor(k), math.ceil(k)
    less, more, ours = (flush_share(one, 2.**x)[0].item() for x in (hi, lo, k))
    assert less <= ours <= more
    assert overflows(one, 2.**k).item() == (one.amax[0].item()*2.**k >= 65520)


def test_overflow_does_not_know_infinity_or_nan():
    t = trace_from_hists('t', [1., INF, NAN, 0.], [log2_hist(torch.ones(2))]*4)
    assert t.bad.tolist() == [False, True, True, False]
    for s in (2.**-24, 1., 2.**15): assert overflows(t, s).tolist() == [False, True, True, False]
    assert overflows(t, 0.).tolist() == [False, True, True, False]                 # 0·inf is no number either
    assert flush_share(t, torch.tensor([1., 0., 2.**-26, NAN]).double()).isnan().tolist() == [False, False, False, True]
    assert flush_share(t, 0.).tolist() == [1.]*4



# --- what a scaler is told ---

def curious(*wants):
    class Curious(StaticScaler): pass
    Curious.required_stats = 'found_inf', *wants
    return Curious


@pytest.mark.parametrize('broken', [None, INF, -INF, NAN])
@pytest.mark.parametrize('k', [-20, -3, 0, 7, 16, 24])
def test_observe_is_what_unscale_sees(broken, k):
    g = normal(500, -10., 3.).half().float()
    g[3] = g[3] if broken is None else broken
    one, C = trace_of(g), curious('numel', 'amax', ('above', 2.**-6), ('above', 2.**13), ('above', 2.**20))
    scaled = (g*2.**k).half()
    # FP16's own largest number is below 2^20, so the last edge counts infinities
    seen = StepController(C(2.**k))
    seen.unscale_([('a', scaled[:100], scaled[:100].float()), ('b', scaled[100:], scaled[100:].float())])
    want, got = dict(seen.stats), observe(one, 0, C(2.**k))
    assert got.pop('loss_finite') == (broken is None) and got.keys() == want.keys()
    want['found_inf'].clamp_(max=1)
    for n in got:
        if isinstance(n, tuple) and broken is not None and not want[n]: assert not got[n]
        elif n == ('above', 2.**20): assert 2/3*want[n] <= got[n] <= 1.5*want[n]     # an edge within an octave: interpolated
        else: assert same_bits(got[n], want[n]), (n, got[n], want[n])


def test_the_scale_of_the_moment_decides():
    t, s = trace_from_bits('010', factor=2.**10), StaticScaler(2.**16)
    assert [observe(t, i, s)['found_inf'].item() for i in range(3)] == [0, 1, 0]
    s.scale.div_(2**8)
    assert [observe(t, i, s)['found_inf'].item() for i in range(3)] == [0, 0, 0]


def test_what_a_trace_cannot_tell():
    with pytest.raises(ValueError, match="cannot tell 'activations'"):
        observe(trace_from_bits('0'), 0, curious('activations')(1.))


# --- storms ---

def test_hard_batches():
    t = overflow_burst(3, at=4, after=2)
    assert len(t) == 9 and t.bad.tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0] and overflows(t, 2.**-24).equal(t.bad)
    assert len(overflow_burst(0, 5, 5)) == 10 and not overflow_burst(0, 5, 5).bad.any()


def test_random_storm():
    a, b, c = random_burst(.1, 4000, 0), random_burst(.1, 4000, 0), random_burst(.1, 4000, 1)
    assert torch.equal(a.bad, b.bad) and not torch.equal(a.bad, c.bad)
    assert all(abs(x.bad.double().mean().item() - .1) < .02 for x in (a, c))
    for rate in (-.1, 1.1): pytest.raises(ValueError, random_burst, rate)


def test_from_bits():
    assert trace_from_bits('01 1\n0').bad.tolist() == [False, True, True, False]
    for bits in ('', '  ', '012', 'yes'):
        with pytest.raises(ValueError, match='is not a script'): trace_from_bits(bits)


@pytest.mark.parametrize('factor', [2.**10, 2.**-7, 1.])
def test_a_finite_factor_moves_whole_octaves(factor):
    g = torch.cat([normal(300), torch.zeros(5)])
    t, want = trace_from_bits('01', like=g, factor=factor), trace_of(g*factor)
    assert t.amax.tolist() == [g.abs().max().item(), g.abs().max().item()*factor]
    for k in range(-30, 30, 7): assert flush_share(t, 2.**k)[1] == flush_share(want, 2.**k)[0]
    assert t.zeros.tolist() == [5, 5]


@pytest.mark.parametrize('factor', [3., 0., -2., 1.5])
def test_other_factors_are_refused(factor):
    with pytest.raises(ValueError, match='power of two, inf or nan'): trace_from_bits('01', factor=factor)


def test_a_batch_beyond_any_scale_tells_nothing():
    t = trace_from_bits('010', like=torch.tensor([1., 0., .5]))
    assert t.broken.tolist() == [0, 3, 0] and t.counts.sum(1).tolist() == [2, 0, 2]
    assert trace_from_bits('1', factor=NAN).amax.isnan().all()


def test_weather_recorded_and_repeated():
    calm = trace_from_hists('two', [1., 4.], [log2_hist(torch.tensor([1.])), log2_hist(torch.tensor([4., 2.**-30]))])
    t = burst_of([0, 0, 0, 1, 0], like=calm)
    assert t.amax.tolist() == [1, 4, 1, INF, 1]
    assert [flush_share(t, 1.)[i].item() for i in (0, 1, 2)] == [0, .5, 0]
    with pytest.raises(ValueError, match='finite gradients'): trace_from_bits('0', like=torch.tensor([INF]))


# --- recording ---

def test_recording_changes_nothing_and_sees_everything():
    seen = []
    def step(model, *args):
        out = plain_step(model, *args); seen.append(torch.cat([p.grad.flatten() for p in model.parameters()])); return out
    rec = Recording(step)
    a, b = train_toy('relu_mlp', rec, steps=5), train_toy('relu_mlp', steps=5)
    assert a.history == b.history
    t = rec.trace('x')
    for i,g in enumerate(seen):
        assert t.amax[i] == g.abs().max().double() and t.zeros[i] == (g == 0).sum()
        assert flush_share(t, 1.)[i].item() == pytest.approx(((g.half() == 0) & (g != 0)).sum().item()/(g != 0).sum().item(), abs=1e-9)
    with pytest.raises(ValueError, match='Nothing was recorded'): Recording().trace()


def test_a_skipped_step_is_recorded_as_bad():
    t = record_trace('relu_mlp', MixedStep(StaticScaler(2.**30)), steps=2)
    assert t.bad.all() and overflows(t, 1.).all() and t.broken.min() > 0


# --- replay ---

def by_hand(scaler, trace):
    "The loop without any short cut"
    s, scales = copy.deepcopy(scaler), []
    for t in range(len(trace)):
        scales.append(s.scale.item())
        s.update(observe(trace, t, s))
    return [*scales, s.scale.item()]


@pytest.mark.parametrize('factor', [INF, 2.**14])
@pytest.mark.parametrize('name', POLICIES)
def test_replay_is_the_plain_loop(name, factor):
    trace = random_burst(.05, 400, seed=3, factor=factor)
    scaler = get_policy(name)
    flight, start = replay(scaler, trace), scaler.scale.clone()
    assert flight.scales[0].tolist() == by_hand(scaler, trace)
    assert same_bits(scaler.scale, start), 'the scaler itself was changed'
    assert torch.equal(flight.skipped[0], overflows(trace, flight.scales[0, :-1]))


@pytest.mark.parametrize('name', [n for n in RULES if n != 'logmax'])
def test_a_name_replays_the_published_rule(name):
    trace = random_burst(.02, 300, seed=1)
    flight = replay(name, trace, 2.**20)
    n = int(flight.stopped[name].split(':')[0].split()[1]) if flight.stopped else len(trace)
    assert flight.scales[0, 1:n + 1].tolist() == follow_rule(name, trace.bad[:n].int().tolist(), dict(scale=2.**20))
    assert flight.scales[0, n + 1:].isnan().all()


class ByCount(StaticScaler):
    "A policy of the kind that is to come: it looks at counts above an edge, and never waits for an overflow"
    required_stats = 'found_inf', 'numel', ('above', 2.**13)
    def next_scale(self, stats): return self.scale*torch.where(stats['above', 2.**13] > 1e-3*stats['numel'], .5, 2.)


@pytest.mark.parametrize('like', [None, torch.tensor([2.**-9, 3e-6, 2.**-12])])
def test_a_policy_that_wants_counts_sees_them_anew_at_each_scale(like):
    trace = random_burst(.1, 150, like=like, factor=2.**8)
    f = replay(ByCount(1.), trace)
    assert f.scales[0].tolist() == by_hand(ByCount(1.), trace)
    assert 2**10 < f.scales[0, 50:].median() < 2**26 and f.scales[0, 50:].unique().numel() >= 3


def test_golden_torch():
    "FACTS: init 2, interval 3, an overflow at step 4"
    f = replay(DynamicScaler(2., growth_interval=3, skip_nonfinite_loss=False), trace_from_bits('0000100000', like=torch.tensor([2.**-20])))
    assert f.scales[0, 1:].tolist() == [2, 2, 4, 4, 2, 2, 2, 4, 4, 4]


def test_the_story_of_ten_hard_batches():
    ends = replay(['torch', 'megatron', 'metaseq', 'fastai', 'fairseq'], overflow_burst(), start=2.**16).table()['end']
    assert ends.to_dict() == dict(torch=6, megatron=7, metaseq=16, fastai=7, fairseq=6)
    at_once = replay(['torch', 'metaseq', 'fastai'], overflow_burst(at=0), start=2.**16).table()['end']
    assert at_once.to_dict() == dict(torch=6, metaseq=15, fastai=6)


def test_a_scale_that_overflows_falls_until_it_fits():
    f = replay(DynamicScaler(2.**20), trace_from_bits('0'*30, like=torch.tensor([1.])))
    assert f.scales[0, -1] == 2**15 and f.skipped[0].tolist() == [True]*5 + [False]*25


def test_a_policy_that_gives_up():
    f = replay({'brave': 'deepspeed', 'calm': get_policy('deepspeed')}, trace_from_bits('0111100'), start=2.)
    assert list(f.stopped) == ['brave'] and f.stopped['brave'].startswith('step 3: ')
    assert f.scales[0].tolist()[:4] == [2, 2, 2, 1] and f.scales[0, 4:].isnan().all() and f.scales[1, -1] == 1
    t = f.table()
    assert t.loc['brave', 'end'] == 0 and t.loc['brave', 'skipped'] == 3 and t.loc['calm', 'skipped'] == 4


def test_a_rule_without_a_floor_sinks_and_a_scaler_stays_at_its_own():
    f = replay({'rule': 'torch', 'scaler': get_policy('torch'), 'ours': DynamicScaler(skip_nonfinite_loss=False), 'hold': DynamicScaler()}, trace_from_bits('1'*200 + '0'*10))
    assert f.scales[:, -1].log2().tolist() == [16 - 200, -126, 0, 16]
    assert f.flushed[:2, -1].tolist() == [1, 1] and not f.skipped[2:, 200:].any()


def test_a_storm_is_a_trace():
    for what in ('random', None, '0110'):
        with pytest.raises(ValueError, match='is not a Trace'): replay('torch', what)


def test_metaseqs_way_back():
    "Its window doubles, and the count goes on from the last overflow"
    for octaves, window, want in ((10, 1, 512), (3, 100, 400), (1, 256, 256), (0, 1000, 0), (4, 3, 24)):
        policy = get_policy('metaseq', init_scale=2.**12, growth_interval=window*2**octaves)
        scales = replay(policy, overflow_burst(octaves, at=0, after=600)).scales[0]
        assert (scales[octaves:] < 2.**12).sum() == want and scales[octaves] == 2.**(12 - octaves)


def test_names_of_policies():
    d = DynamicScaler()
    assert list(named_policies(['torch', d])) == ['torch', str(d)]
    assert list(named_policies('torch')) == ['torch'] and list(named_policies({'mine': d})) == ['mine']
    assert list(named_policies()) == list(RULES)
    with pytest.raises(ValueError, match='have one name'): named_policies([d, DynamicScaler()])
    with pytest.raises(ValueError, match='nobody'): replay('nobody', trace_from_bits('0'))
    with pytest.raises(ValueError): replay('torch', trace_from_bits('0'), start=0.)
    with pytest.raises(ValueError): replay('torch', trace_from_bits('0'))['megatron']


def test_start_is_the_same_for_all():
    f = replay(None, trace_from_bits('00'), start=2.**10)
    assert set(f.scales[:, 0].tolist()) == {2.**10}
    assert replay('torch', trace_from_bits('00')).scales[0, 0] == get_policy('torch').scale
    assert replay('logmax', trace_from_bits('0'), 2.**20).scales[0, 0] == 2.**14
    assert replay(DynamicScaler(min_scale=8.), trace_from_bits('0'), 2.).scales[0, 0] == 8


@pytest.mark.parametrize('name', POLICIES)
def test_every_scaler_survives_a_long_storm(name):
    f = replay(get_policy(name), trace_from_bits('1'*3000))
    assert (f.scales >= 2.**-126).all() and f.scales.isfinite().all()


def test_plot():
    import matplotlib.pyplot as plt
    f = replay(['torch', 'metaseq'], overflow_burst(3, 5, 100), start=2.**16)
    ax = plot_result(f)
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ['torch', 'metaseq']
    assert len(ax.lines) == 3 and ax.lines[2].get_xdata().tolist() == [5, 6, 7]
    assert ax.lines[0].get_ydata().tolist() == f['torch'].tolist()
    assert len(plot_result(f, names=['torch']).lines) == 2
    with pytest.raises(ValueError): plot_result(f, names=['torch', 'nobody'])
    plt.close('all')
