"""What a scheme makes of a step, verdicts on it, and that nothing of the user's is changed"""
import copy, math
from types import SimpleNamespace

import pytest, torch, torch.nn.functional as F
from torch import nn

import mpcourse.zoo  # noqa: F401
from mpcourse.advise import PROBES, STEPS, STORED, ShadowModel, SchemeProbe, advise_schemes, arrived, as_taken, judge, weight_matrices, projection_ratio
from mpcourse.compare import SCHEMES, Training, toy_training
from mpcourse.toys import plain_step, TOYS

pytestmark = pytest.mark.library


def linear(scale=1., n=120, opt=None):
    "A training whose gradients are as small as one likes"
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(n, 32, 8, generator=gen)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    return Training(model, opt or (lambda ps: torch.optim.Adam(ps, 1e-3, eps=1e-30)), lambda p, y: F.mse_loss(p, y)*scale, lambda: iter([(b, b[:, :1]) for b in x]))


def ask(t, **how): return advise_schemes(t.model, t.opt(t.model.parameters()), t.loss_func, t.batches(), **how)


def test_a_trial_gives_the_gradients_of_fp32():
    t = linear()
    batch = next(t.batches())
    got = SchemeProbe('FP32', t).gradients(t.model, batch)
    t.loss_func(t.model(batch[0]), batch[1]).backward()
    assert set(got) == {'0.weight', '2.weight'} and all(torch.equal(got[n], p.grad) for n, p in weight_matrices(t.model).items())


@pytest.mark.parametrize('name', [s for s in SCHEMES if 'weights' not in s])
def test_a_trial_is_of_the_weights_that_it_is_shown(name):
    t = linear()
    trial, batch = SchemeProbe(name, t), next(t.batches())
    for p in t.model.parameters(): p.data *= 2
    got, true = trial.gradients(t.model, batch), SchemeProbe('FP32', t).gradients(t.model, batch)
    if 'no scale' not in name: assert all(abs(projection_ratio(got[n], g) - 1) < .2 for n, g in true.items())
    assert all(torch.equal(a, b) for a, b in zip(trial.gradients(t.model, batch).values(), got.values())), 'the trial moved'


def test_a_scale_settles_before_it_is_judged():
    t = linear(2.**-30)
    batch = next(t.batches())
    trial = SchemeProbe('FP16 ALS', t)
    assert projection_ratio(*[trials.gradients(t.model, batch)['0.weight'] for trials in (trial, SchemeProbe('FP32', t))]) > .99 and trial.scaler.scale > 2.**30
    t = linear(2.**8)
    trial = SchemeProbe('FP16 Megatron', t)
    assert trial.gradients(t.model, batch) is not None and trial.scaler.scale < 1e6
    t = linear(2.**60)
    assert SchemeProbe('FP16 hold', t).gradients(t.model, batch) is None, 'no scale of one or more is low enough'


def test_adam_takes_small_entries_as_it_takes_large_ones():
    model = nn.Linear(2, 1, bias=False)
    g, lost = torch.tensor([[1., 1e-6]]), torch.tensor([[1., 0.]])
    adam, sgd = torch.optim.Adam(model.parameters(), eps=1e-30), torch.optim.SGD(model.parameters(), 1.)
    kept = {k: projection_ratio(as_taken({'weight': lost}, o, model)['weight'], as_taken({'weight': g}, o, model)['weight']) for k, o in dict(adam=adam, sgd=sgd).items()}
    assert kept['sgd'] > .999999 and abs(kept['adam'] - .5) < 1e-6


def test_adams_step_is_adams():
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=False)
    opt = torch.optim.Adam(model.parameters(), lr=1., betas=(0., .9), eps=1e-3)
    for _ in range(3):
        g = torch.randn(3, 4)
        want, before = as_taken({'weight': g}, opt, model)['weight'], model.weight.detach().clone()
        model.weight.grad = g.clone()
        opt.step()
        assert torch.allclose(before - model.weight, want, atol=1e-5)


def test_arrived_is_a_share():
    g = torch.tensor([1., 0.])
    assert arrived(dict(w=torch.tensor([.5, 1.])), dict(w=g)) == dict(w=.5) and arrived(dict(w=-g), dict(w=g)) == dict(w=-1.)
    assert arrived(dict(w=g), dict(w=g*0)) == arrived({}, dict(w=g)) == {}


def test_a_shadow_swallows_what_bf16_swallows():
    model = nn.Linear(64, 64, bias=False)
    nn.init.ones_(model.weight)
    shadows = {how: ShadowModel(model, how) for how in ('nearest', 'stochastic')}
    torch.manual_seed(0)
    trained = copy.deepcopy(model)
    for _ in range(64):
        before = {'weight': trained.weight.detach().clone()}
        with torch.no_grad(): trained.weight += 2.**-10
        for s in shadows.values(): s.follow(before, trained)
    assert shadows['nearest'].arrived(trained)['weight'] == 0 and abs(shadows['stochastic'].arrived(trained)['weight'] - 1) < .05


@pytest.mark.parametrize('seen, says', [
    ([dict(a=1., b=.8)]*8, 'yes'), ([dict(a=1., b=.2)]*8, 'no'), ([dict(a=.79)]*8, 'cannot tell'), ([dict(a=1.)]*7 + [dict(a=-3.)], 'cannot tell'),
    ([None]*4 + [dict(a=1.)]*4, 'no'), ([None] + [dict(a=1.)]*7, 'cannot tell'), ([dict(a=.1)]*3 + [dict(a=1.)]*5, 'cannot tell')])
def test_verdicts(seen, says): assert judge(seen)[0] == says


def test_stored_weights_get_no_no_and_no_yes_where_bf16_has_none():
    slow = linear(opt=lambda ps: torch.optim.Adam(ps, 1e-8))
    advice = ask(slow, schemes=('BF16', *STORED))
    assert {n: v for n, (v, _) in advice.verdicts.items()} == {'BF16': 'yes', 'BF16 weights': 'cannot tell', 'BF16 weights stochastic': 'cannot tell'}
    assert 'after a hundred updates 0% arrives' in advice.verdicts['BF16 weights'][1]
    assert ask(linear(), schemes=('BF16', *STORED)).verdicts['BF16 weights stochastic'][0] == 'yes'


def test_advice_names_the_place_where_the_damage_begins():
    advice = ask(linear(2.**-34))
    said = {n: v for n, (v, _) in advice.verdicts.items()}
    assert said['FP16 scale 1'] == 'no' and said['FP16 measured'] == said['FP16 ALS'] == said['BF16'] == 'yes'
    assert advice.verdicts['FP16 scale 1'][1].endswith('arrives: underflow begins backward in _to_copy outside the layers, at test_advise.py:25')
    assert 'arrives in ' in advice.verdicts['BF16'][1]
    assert list(advice.verdicts) == [*STEPS, *STORED] and all(len(advice.seen[n]) == len(PROBES) for n in STEPS)
    assert list(advice.table().columns) == ['verdict', 'because', 'setting'] and advice.plot().images[0].get_array().shape == (len(STEPS), len(PROBES))


def test_nothing_of_the_users_changes():
    t = linear()
    opt = t.opt(t.model.parameters())
    for b in list(t.batches())[:3]: plain_step(t.model, *b, opt, t.loss_func)
    before, rng = copy.deepcopy((t.model.state_dict(), opt.state_dict())), torch.random.get_rng_state()
    advise_schemes(t.model, opt, t.loss_func, t.batches(), 40)
    for a, b in zip(torch.utils._pytree.tree_leaves(before), torch.utils._pytree.tree_leaves((t.model.state_dict(), opt.state_dict()))):
        assert torch.equal(a, b) if torch.is_tensor(a) else a == b
    assert torch.equal(rng, torch.random.get_rng_state())


def test_it_watches_the_training_that_would_have_been():
    t = linear()
    opt = t.opt(t.model.parameters())
    seen = []
    loss_func = t.loss_func
    def loss(p, y):
        seen.append(loss_func(p, y).item())
        return loss_func(p, y)
    advise_schemes(t.model, opt, loss, t.batches(), 30, lambda i: 1/(i + 1), ())
    losses = []
    for i, b in zip(range(30), t.batches()):
        for g in opt.param_groups: g['lr'] = 1e-3/(i + 1)
        losses.append(plain_step(t.model, *b, opt, t.loss_func).item())
    assert set(losses) <= set(seen)


def test_few_batches_are_few_looks():
    t = linear(n=6)
    advice = ask(t, schemes=('BF16',))
    assert len(advice.seen['BF16']) == 3                 # steps 0, 1, 3 of six


def test_a_scheme_that_refuses_the_net_says_why():
    advice = ask(toy_training('cnn', 0), steps=4, schemes=('BF16', 'E4M3 blocks'))
    assert advice.verdicts['BF16'][0] == 'yes' and advice.verdicts['E4M3 blocks'][0] == 'cannot run' and 'convolution' in advice.verdicts['E4M3 blocks'][1]


def test_fp32_that_fails_blames_no_format():
    t = linear()
    bad = [(x*math.inf, y) for x, y in t.batches()]
    with pytest.raises(ValueError, match='mend the training'): advise_schemes(t.model, t.opt(t.model.parameters()), t.loss_func, bad)


def test_remarks():
    assert any('did not fall' in r for r in ask(linear(opt=lambda ps: torch.optim.SGD(ps, 0.)), schemes=()).remarks)
    assert any('a sum' in r for r in ask(linear(2.**20), schemes=()).remarks)
    assert any('epsilon' in r for r in ask(linear(2.**-40, opt=lambda ps: torch.optim.Adam(ps, 1e-3)), schemes=()).remarks)
    assert not any('octaves' in r for r in ask(linear(), schemes=()).remarks)
    assert any('octaves' in r for r in ask(toy_training('deep_sigmoid'), steps=3, schemes=()).remarks)


@pytest.mark.parametrize('opt, of', [('Adam', torch.optim.Adam), ('SGD', torch.optim.SGD)])
def test_a_learner_is_advised_and_not_changed(opt, of):
    import fastai.basics as fastai
    from mpcourse.callback import tensor_dls
    from mpcourse.learner import _torch_optimizer
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    learn = fastai.Learner(tensor_dls((x, x[:, :1]), (x, x[:, :1]), 16), nn.Linear(8, 1), loss_func=F.mse_loss, opt_func=getattr(fastai, opt), lr=.01)
    before = copy.deepcopy(learn.model.state_dict())
    advice = learn.advise(20, schemes=('BF16', 'FP16 scale 1'))
    assert {v for v, _ in advice.verdicts.values()} == {'yes'} and len(advice.seen['BF16']) == 5
    assert learn.opt is None and all(torch.equal(a, b) for a, b in zip(before.values(), learn.model.state_dict().values()))
    made = _torch_optimizer(learn)
    assert type(made) is of and made.param_groups[0]['lr'] == .01
    if opt == 'Adam': assert made.param_groups[0]['betas'] == (.9, .99) and made.param_groups[0]['eps'] == 1e-5


def test_the_console_command(tmp_path, monkeypatch, capsys):
    from mpcourse.cli import main
    monkeypatch.chdir(tmp_path)
    assert main(['advise', 'relu_mlp', '--steps', '5']) == 3, 'some scheme is a no'
    out = capsys.readouterr().out
    assert 'FP16 hold' in out and 'arrives in' in out and '  no  ' in out
    assert main(['advise', 'relu_mlp', '--steps', '2', '--schemes', 'bf16,tensorwise']) == 0
    assert main(['advise', 'chess']) == 2 and "There is no toy 'chess'" in capsys.readouterr().err


def test_no_verdict_without_grounds():
    t = linear()
    for schemes in (('FP16 weights',), ('BF16', 'magic')):
        with pytest.raises(ValueError, match='no advice on'): ask(t, schemes=schemes)
    with pytest.raises(ValueError, match='no batch'): advise_schemes(t.model, t.opt(t.model.parameters()), t.loss_func, [])
    with pytest.raises(ValueError, match='No weight matrix of this model is trained'): advise_schemes(nn.BatchNorm1d(8), torch.optim.SGD([torch.ones(1)], 1.), F.mse_loss, t.batches())
    assert ask(t, schemes=('BF16 weights',)).verdicts['BF16 weights'][0] == 'cannot tell'
    assert not any('did not fall' in r for r in ask(t, steps=5, schemes=()).remarks)


@pytest.mark.parametrize('opt, verdict', [(torch.optim.SGD, 'yes'), (torch.optim.NAdam, 'yes'), (torch.optim.RMSprop, 'cannot tell'), (torch.optim.Adamax, 'cannot tell'),
                                          (torch.optim.Adagrad, 'cannot tell')])
def test_how_an_unknown_optimizer_steps_is_not_guessed(opt, verdict):
    t = linear()
    a = advise_schemes(t.model, opt(t.model.parameters(), lr=1e-3), t.loss_func, t.batches(), steps=4, schemes=('BF16', 'E4M3 per tensor'))
    assert {v for v, _ in a.verdicts.values()} == {verdict}
    assert repr(a).splitlines()[0].split()[:2] == ['BF16', *verdict.split()][:2] and ('is not known' in repr(a)) == (verdict == 'cannot tell')


class Pair(nn.Module):
    def __init__(self, model): super().__init__(); self.model = model
    def forward(self, x): return self.model(x), x


def test_an_answer_of_two_parts_and_a_frozen_layer():
    t = linear()
    model = Pair(t.model)
    frozen = next(p for p in model.parameters() if p.dim() > 1)
    if sum(p.dim() > 1 for p in model.parameters()) > 1: frozen.requires_grad_(False)
    a = advise_schemes(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-2), lambda out, y: t.loss_func(out[0], y), t.batches(), steps=3)
    assert not any(v == 'cannot run' for v, _ in a.verdicts.values()), a


def test_a_page_and_settings(tmp_path):
    a = ask(linear(), steps=4, schemes=('FP16 measured', 'FP16 scale 1', 'BF16'))
    assert list(a.table().columns) == ['verdict', 'because', 'setting'] and set(a.settings) == {'FP16 measured'}
    assert int(a.settings['FP16 measured'].split('^')[1]) > 4
    a.remarks.append('1 < 2')
    assert '<table' in a.html() and 'src="data:image/png' in a.html() and '1 &lt; 2' in a.html()


def test_a_model_that_takes_a_dictionary_through_three_lines():
    class Named(nn.Module):
        "Called by names, as models of transformers are, and returns an object"
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32))
        def forward(self, input_ids=None, attention_mask=None): return SimpleNamespace(logits=self.body(input_ids)*attention_mask[..., None])
    class Logits(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model
        def forward(self, ids, mask): return self.model(input_ids=ids, attention_mask=mask).logits
    torch.manual_seed(0)
    model = Logits(Named())
    batches = [((x, torch.ones_like(x)), x) for x in torch.randint(32, (6, 4, 16))]
    a = advise_schemes(model, torch.optim.Adam(model.parameters(), 1e-3), lambda y, x: F.cross_entropy(y[:, :-1].flatten(0, 1), x[:, 1:].flatten()),
               batches, 4, schemes=('BF16', 'FP16 measured'))
    assert [v for v, _ in a.verdicts.values()] == ['yes', 'yes']


def test_the_console_takes_some_schemes(capsys):
    from mpcourse.cli import main
    assert main(['advise', 'relu_mlp', '--steps', '3', '--schemes', 'bf16,fp16']) == 0
    out = capsys.readouterr().out
    assert all(f'{n} ' in out for n in STEPS if n[:4] in ('BF16', 'FP16')) and 'E4M3' not in out and 'BF16 weights' not in out
    assert main(['advise', 'relu_mlp', '--schemes', 'fp99']) == 2 and 'no advice on' in capsys.readouterr().err


def test_the_remaining_time_knows_that_looks_take_longer(monkeypatch, capsys):
    from mpcourse import cli
    now = [0.]
    monkeypatch.setattr(cli.time, 'perf_counter', lambda: now[0])
    bar = cli.Progress(100, 'step', PROBES.__contains__)
    for i in range(100):
        bar()
        if i in (8, 64): assert bar.left() == sum(10. if j in PROBES else 1. for j in range(i + 1, 100))
        now[0] += 10. if i in PROBES else 1.
    assert '8 of 100, about' in capsys.readouterr().err


def test_an_error_keeps_its_traceback():
    advice = ask(toy_training('cnn', 0), steps=2, schemes=('E4M3 blocks',))
    assert 'Traceback' in advice.tracebacks['E4M3 blocks'] and 'fp8.py' in advice.tracebacks['E4M3 blocks']
    assert ask(linear(), steps=2, schemes=('BF16',)).tracebacks == {}


@pytest.mark.parametrize('name', TOYS)
def test_no_remark_contradicts_the_table(name):
    "On the nets of chapter 33, whose trainings are known"
    advice = ask(toy_training(name), steps=2, schemes=('BF16', 'FP16 measured', 'FP16 scale 1'))
    said, words = ' '.join(advice.remarks), {n: v for n, (v, _) in advice.verdicts.items()}
    assert ('no scale here mends that' in said) <= ('yes' not in (words['FP16 measured'], words['FP16 scale 1']))
    assert 'either' not in said


def test_a_batch_of_nan_does_not_reach_the_weights():
    "They are shared with the training"
    t = linear()
    x, y = next(t.batches())
    was = copy.deepcopy(t.model.state_dict())
    for name in ('BF16', 'FP16 hold', 'E4M3 per tensor'): assert SchemeProbe(name, t).gradients(t.model, (x*math.nan, y)) is None
    assert all(torch.equal(a, b) for a, b in zip(was.values(), t.model.state_dict().values()))


# --- what a reviewer broke ---

def test_a_ratio_of_tiny_and_huge_gradients():
    for size in (1e-24, 1e20): assert projection_ratio(torch.full((3,), size), torch.full((3,), size)) == 1


class Detached(nn.Module):
    "Its matrix gets no gradient"
    def __init__(self): super().__init__(); self.lin = nn.Linear(8, 1)
    def forward(self, x): return F.linear(x, self.lin.weight.detach(), self.lin.bias)


def test_where_nothing_arrives_in_fp32_nothing_can_be_told():
    t = linear()
    t.model = Detached()
    advice = ask(t, steps=2, schemes='BF16')
    assert advice.verdicts['BF16'][0] == 'cannot tell' and any('no weight matrix' in r for r in advice.remarks)
    warm = ask(linear(), steps=1, schedule=lambda i: 0.)
    assert {v for v, _ in warm.verdicts.values()} <= {'cannot tell', 'yes'} and warm.html()


def test_only_stored_schemes_have_a_picture_too():
    page = ask(linear(), steps=2, schemes=['BF16 weights']).html()
    assert 'BF16 weights' in page and ('<svg' in page or '<img' in page)


@pytest.mark.parametrize('make, says', [(lambda m: torch.optim.SGD(nn.Linear(8, 1).parameters(), .1), 'moves no parameter'), (lambda m: torch.optim.LBFGS(m.parameters()), 'LBFGS')])
def test_an_optimizer_that_cannot_be(make, says):
    t = linear()
    with pytest.raises(ValueError, match=says): advise_schemes(t.model, make(t.model), t.loss_func, t.batches(), 2, schemes=['BF16'])
    with pytest.raises(ValueError, match='steps=0'): ask(t, steps=0)
