"Sick trainings: each is sick, its own cure cures, evidence tells them apart, and the points are what they should be"
import math
from types import SimpleNamespace

import pytest, torch

from mpcourse.cases import CAUSES, CURES, GUESS, REMEDIES, Case, evidence, lost_by, outcomes, score, solutions, train_patient
from tools.exercises import checkers
from mpcourse.sanitizer import probe_precision
from mpcourse.toys import plain_step
from mpcourse.zoo import study
from conftest import NBS

TABLE = study('sick_trainings')
PATIENTS, TRUTH, SIX = TABLE.module.PATIENTS, outcomes(TABLE), 'ABCDEF'
# a diagnosis for each, from the evidence alone
DIAGNOSES = dict(
    A=lambda e: e['coarse'] == 1 and e['still'] > .4,
    B=lambda e: e['behind'] > 0,
    C=lambda e: e['burst'] >= 12 and e['skipped'] < 40 and e['kept'] < .3,
    D=lambda e: e['octaves'] > 30,
    E=lambda e: e['kept'] < .3 and e['octaves'] < 30 and e['burst'] == 0,
    F=lambda e: e['buffers'] > 0,
    G=lambda e: e['ratio'] > 1.6)


@pytest.fixture(scope='module')
def check():
    path, = [p for p in NBS if p.stem == '35_cases']
    return checkers(path)['diagnose']


@pytest.fixture
def quick(monkeypatch):
    "A case whose trainings take no time"
    monkeypatch.setattr('mpcourse.cases.train_patient', lambda patient, remedy='nothing', seed=0: SimpleNamespace(remedy=remedy, score=0.))
    return lambda name: Case(TABLE, name)


# --- the patients ---

@pytest.mark.sweep(0)
@pytest.mark.parametrize('name', PATIENTS)
def test_every_case_is_sick_and_its_own_cure_cures(name):
    p = PATIENTS[name]
    sick, own, healthy = (train_patient(p, r, 0) for r in ('nothing', 'own', 'healthy'))
    assert not lost_by(sick, healthy) < .5, 'it is not sick'
    assert lost_by(own, healthy) < .5, 'its own cure does not cure'
    assert healthy.score < healthy.before
    found = {n for n, f in DIAGNOSES.items() if f(evidence(sick))}, {n for n, f in DIAGNOSES.items() if f(evidence(own))}
    assert found == ({name}, set())


def test_all_seeds_agree_on_what_is_asked():
    assert len(TABLE.seeds) >= 5
    for name, truth in TRUTH.items(): assert truth['nothing'] is False and truth['own'] is True, name
    assert [n for n in SIX for r in REMEDIES if TRUTH[n][r] is None] == ['C'] and TRUTH['C']['start 2^24'] is None


def test_who_always_does_the_same_cures_five_at_best():
    cured = {r: sum(TRUTH[n][r] is True for n in SIX) for r in ('nothing', *REMEDIES)}
    assert cured == {'nothing': 0, 'FP32': 4, 'BF16': 5, 'measured': 3, 'start 2^24': 1}
    asked = [(r, TRUTH[n][r]) for n in SIX for r in REMEDIES if TRUTH[n][r] is not None]
    assert len(asked) == 23 and sum(GUESS[r] == c for r, c in asked) == 16
    for said in range(16):                                  # no fixed row of four answers is right more often
        row = {r: bool(said >> i & 1) for i, r in enumerate(REMEDIES)}
        assert sum(row[r] == c for r, c in asked) <= 16


def test_a_cause_and_a_cure_each():
    assert {p.cause for p in PATIENTS.values()} < {*CAUSES} and {p.cure for p in PATIENTS.values()} < {*CURES}
    assert len({p.cause for p in PATIENTS.values()}) == len({p.cure for p in PATIENTS.values()}) == len(PATIENTS) == 7
    assert all(len(p.note.split()) > 15 for p in PATIENTS.values())


def test_a_training_is_the_same_twice():
    a, b = (train_patient(PATIENTS['B'], 'BF16', 3) for _ in range(2))
    assert a.log.loss.equals(b.log.loss) and a.score == b.score
    assert not a.log.loss.equals(train_patient(PATIENTS['B'], 'BF16', 4).log.loss)


# --- three of today ---

TODAY = study('sick_today')
NEW = TODAY.module.PATIENTS


@pytest.mark.sweep(4)
@pytest.mark.parametrize('name', NEW)
def test_each_of_today_is_sick_and_its_own_cure_cures(name):
    truth = outcomes(TODAY)[name]
    assert truth['nothing'] is False and truth['own'] is True and len(TODAY.seeds) == 10
    assert NEW[name].cause in CAUSES and NEW[name].cure in CURES and NEW[name].cause not in {p.cause for p in PATIENTS.values()}
    sick, own, healthy = (train_patient(NEW[name], r, 0) for r in ('nothing', 'own', 'healthy'))
    assert not lost_by(sick, healthy) < .5 and lost_by(own, healthy) < .5


def test_the_old_rules_mistake_one_of_today_and_the_probe_names_two():
    found = {name: evidence(train_patient(patient)) for name, patient in NEW.items()}
    assert {name for name, e in found.items() if any(rule(e) for rule in DIAGNOSES.values())} == {'J'}
    kinds = dict(offset={'a large offset'}, cancellation={'cancellation', 'a large offset'}, epsilon=set())
    for name, patient in NEW.items():
        t = patient.make(1, False)
        report = probe_precision(t.model, next(t.batches()), t.loss_func, 'bf16')
        named = report.worst is not None and report.worst.kind in kinds[patient.cause]
        assert named == (name != 'I'), str(report)


# --- the evidence ---

@pytest.mark.chapters('35_cases')
@pytest.mark.parametrize('name', DIAGNOSES)
def test_each_diagnosis_fires_on_its_own_case_alone(check, name):
    assert check(DIAGNOSES[name]) == f'{name}: nothing'


@pytest.mark.chapters('35_cases')
@pytest.mark.parametrize('f, says', [
    (lambda e: True, 'fires on'), (lambda e: False, 'no training'), (lambda e: e['kept'] < .3, 'C: nothing, D: nothing, E: nothing'),
    (lambda e: e['skipped'] == 6, 'which is cured'), (lambda e: e['octaves'] > 37.8, 'seeds of')])
def test_a_diagnosis_that_fires_elsewhere_is_rejected(check, f, says):
    with pytest.raises(AssertionError, match=says): check(f)


def record(**parts):
    "A record of a layer that has learnt nothing"
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    batch = torch.randn(8, 4), torch.randn(8, 2)
    import pandas as pd
    r = SimpleNamespace(plain=model, first=model, model=model, middle={'weight': model.weight.detach().clone()}, step=plain_step,
                        loss_func=torch.nn.functional.mse_loss, batches=[batch]*3, log=pd.DataFrame(dict(loss=[2.]*30 + [1.]*30)))
    vars(r).update(parts)
    return r


def test_evidence_of_a_plain_step():
    e = evidence(record())
    assert len(e) == 11 and e['fell'] == .5 and e['skipped'] == e['burst'] == e['buffers'] == e['behind'] == e['coarse'] == e['octaves'] == 0
    assert math.isnan(e['scale']) and e['still'] == 1 and abs(e['kept'] - 1) < 1e-6 and .3 < e['ratio'] < 3


def test_evidence_moves_nothing():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    before = {n: v.clone() for n, v in model.state_dict().items()}
    evidence(record(plain=model, first=model, model=model, middle={'1.weight': before['1.weight']}))
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items()) and model[1].weight.grad is None


def test_what_is_kept_of_a_step_that_is_skipped_or_halved():
    def skips(model, xb, yb, opt, loss_func): return dict(loss=loss_func(model(xb), yb).detach(), skipped=1.)
    def half(model, xb, yb, opt, loss_func): return plain_step(model, xb, yb, opt, lambda p, y: loss_func(p, y)/2)
    assert evidence(record(step=skips))['kept'] == 0 and abs(evidence(record(step=half))['kept'] - .5) < 1e-6


def test_a_nan_behind_a_finite_loss_and_a_sum():
    def root(p, y): return 1 + (p*0).sqrt().mean()
    def summed(p, y): return (p - y).square().sum()
    r = record()
    assert evidence(record(loss_func=root))['behind'] == 3
    x = r.batches[0][0][:4].repeat(2, 1)
    twice = [(x, torch.zeros(8, 2))]
    assert evidence(record(loss_func=summed, batches=twice))['ratio'] == pytest.approx(2)
    assert evidence(record(batches=twice))['ratio'] == pytest.approx(1)


# --- the rules ---

def test_three_runs_and_the_last_one_after_the_answer(quick):
    c = quick('G')
    for r in ('FP32', 'measured'): assert c.run(r).remedy == r
    with pytest.raises(ValueError, match='after the answer'): c.run('BF16')
    with pytest.raises(ValueError, match='predict BF16, start 2'): c.answer('sum', 'mean', {r: True for r in REMEDIES})
    assert c.answer('sum', 'mean', {'BF16': True, 'start 2^24': True}) == dict(cause=True, cure=True, predictions=1, guess=2, asked=2)
    assert c.run('own').remedy == 'own'
    with pytest.raises(ValueError, match='three'): c.run('BF16')
    with pytest.raises(ValueError, match='once'): c.answer('sum', 'mean', {'BF16': True, 'start 2^24': True})


def test_the_own_cure_waits_for_the_answer(quick):
    with pytest.raises(ValueError, match='after the answer'): quick('A').run('own')


@pytest.mark.parametrize('cause, cure, said', [('luck', 'mean', GUESS), ('sum', 'prayer', GUESS), ('sum', 'mean', {'FP32': True})])
def test_what_is_no_answer(quick, cause, cure, said):
    c = quick('G')
    with pytest.raises(ValueError): c.answer(cause, cure, said)
    assert not c.points, 'it counted all the same'


def test_no_such_case_or_remedy(quick):
    with pytest.raises(ValueError, match="'Z'"): quick('Z')
    with pytest.raises(ValueError, match='prayer'): quick('A').run('prayer')


def test_points_beside_those_of_a_guess(quick):
    cases = [quick(n) for n in SIX]
    assert score(cases[:0]).sum().sum() == 0
    for c in cases: c.answer('rate', 'clip', GUESS)
    s = score(cases).loc['sum']
    assert (s.cause, s.cure, s.predictions, s.guess, s.asked) == (0, 0, 16, 16, 23)
    cases = [quick(n) for n in SIX]
    for c in cases: c.answer(PATIENTS[c.name].cause, PATIENTS[c.name].cure, {r: TRUTH[c.name][r] is True for r in REMEDIES})
    s = score(cases).loc['sum']
    assert (s.cause, s.cure, s.predictions, s.guess, s.asked) == (6, 6, 23, 16, 23)


def test_a_solution_waits_for_the_answer_and_teachers_need_not(quick):
    c = quick('D')
    with pytest.raises(ValueError, match='reveal'): c.solution()
    assert c.solution(reveal=True).cause == PATIENTS['D'].cause
    c.answer('sum', 'mean', GUESS)
    assert c.solution().note == PATIENTS['D'].note
    assert list(solutions(TABLE).index) == list(PATIENTS)


def test_where_seeds_differ_nothing_is_asked():
    rows = {'A: x': [.1, .2], 'A: y': [.1, .9], 'B: x': [math.nan, .6], 'B: y': [.4, math.nan]}
    table = SimpleNamespace(rows=list(rows), values=lambda row, k: rows[row])
    assert outcomes(table) == dict(A=dict(x=True, y=None), B=dict(x=False, y=None))


@pytest.mark.chapters('35_cases')
def test_the_notebook_names_no_answer():
    path, = [p for p in NBS if p.stem == '35_cases']
    text = path.read_text(encoding='utf-8').split('Put it to work')[0]
    for name in SIX:
        for word in (PATIENTS[name].cause, PATIENTS[name].cure): assert text.count(f"'{word}'") <= 1, f'{word} stands outside the lists of words'
        assert PATIENTS[name].note[:40] not in text
