"Promise 4: all ranks take the same decision"
from pathlib import Path

import pytest, torch

import on_ranks

HERE, KEPT = Path(__file__).parent, {}
CODE = f'''
sys.path.insert(0, {str(HERE)!r})
import on_ranks
torch.save(on_ranks.everything(rank, folder), f'{{folder}}/{{rank}}.pt')
'''


@pytest.fixture
def both(ranks):
    "What rank 0 and rank 1 told, of all cases: two processes for the whole file"
    if 'both' not in KEPT: KEPT['both'] = ranks(CODE)
    return KEPT['both']


CASES = [*[('step', p) for p in on_ranks.POLICIES], *[('gradscaler', p) for p in on_ranks.POLICIES], ('fused', 'dynamic'), ('gradscaler alone', 'dynamic'), ('learner alone', 'dynamic'),
         *[(h, p) for h in ('learner', 'alone') for p in ('dynamic', 'als')], ('sharded', 'dynamic'),
         ('sharded', 'logmax'), ('sharded', 'als_weights')]


@pytest.mark.parametrize('host, policy', CASES)
def test_two_ranks_decide_as_one(host, policy, both):
    a, b = (r[host, policy] for r in both)
    assert a['trace'] == b['trace'] and not any(isinstance(t, str) for t in a['trace']), (a['trace'], b['trace'])
    assert all(torch.equal(p, q) and p.isfinite().all() for p,q in zip(a['weights'], b['weights']))
    scales = {t[0] if isinstance(t, tuple) else t for t in a['trace']}
    assert len(scales) > 1, 'nothing was decided'
    if host in ('step', 'alone'): assert [k for _,k in a['trace']].count(True) >= 3     # rank 1's infinities, on both


def test_one_rank_sees_all_that_the_others_saw(both):
    assert [r['sees all', 'als']['trace'] for r in both] == [[2.**3, 2.**2, 2.**3]]*2


@pytest.mark.parametrize('host', ('step', 'gradscaler'))
def test_a_rank_without_gradients_takes_part_in_the_decision(host, both):
    a, b = (r['no gradients', host]['trace'] for r in both)
    assert a == b and (a == [False, False, True, False] if host == 'step' else a[2] < a[1])


def test_a_step_skipped_for_one_rank_puts_the_buffers_of_all_back(both):
    assert [r['buffers', 'static']['trace'] for r in both] == [[True, False, True]]*2


@pytest.mark.parametrize('host', ('step', 'gradscaler'))
def test_ranks_that_stop_at_different_batches_are_refused_and_never_wait(host, both):
    assert all(r['join', host]['trace'] == [True] for r in both)


def test_a_refusal_is_the_same_on_every_rank(both):
    a, b = (r['refusal', 'dynamic']['trace'] for r in both)
    assert a == b


def test_each_rank_resumes_its_own_training(both):
    for r in both:
        r = r['resumed', 'dynamic']
        assert not isinstance(r['again'], str), r['again']
        assert all(map(torch.equal, r['whole'], r['again']))
