"""The first edition as the oracle of a rewrite: the same trainings there and here, bit for bit, on one machine.

    python tools/oracle.py              all cases: a table, exit code 1 if anything differs
    python tools/oracle.py step als     those whose name contains one of these words
    python tools/oracle.py --promises   tests/promises, run on the first edition
    python tools/oracle.py --golden     write tests/golden/scales.json anew, from the first edition"""
import json, os, random, subprocess, sys, warnings
from pathlib import Path

FIRST_EDITION = '76d9f0d'           # of the history of this repository; no tag, which would not travel
ROOT = Path(__file__).resolve().parent.parent
WORK, PROMISES, GOLDEN = ROOT/'.oracle', ROOT/'tests'/'promises', ROOT/'tests'/'golden'/'scales.json'
TOYS = dict(deep_sigmoid=60, cnn=30, char_lm=6)         # steps of each
SCALERS = dict(static={}, dynamic=dict(growth_interval=7), als={}, megatron=dict(growth_interval=7))
POLICIES = ('static', 'dynamic', 'hysteresis', 'torch', 'fastai', 'apex_amp', 'apex_legacy', 'apex_hysteresis', 'megatron',
            'deepspeed', 'fairseq', 'metaseq', 'backoff', 'logmax', 'als')


def first_edition():
    "A work tree of the first edition, made once"
    tree = WORK/FIRST_EDITION
    if not (tree/'mpcourse').is_dir():
        WORK.mkdir(exist_ok=True)
        subprocess.run(['git', 'worktree', 'prune'], cwd=ROOT, check=True)
        subprocess.run(['git', 'worktree', 'add', '--detach', '--force', tree, FIRST_EDITION], cwd=ROOT, check=True,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return tree


def python(tree, *args, **kw):
    "Start Python with the mpcourse of a tree"
    env = os.environ | dict(PYTHONPATH=os.pathsep.join(map(str, (tree, PROMISES))), OMP_NUM_THREADS='1')
    return subprocess.Popen([sys.executable, *map(str, args)], cwd=tree, env=env, **kw)


# --- what is compared: each case is a list of rows, and a row is numbers and tensors ---

def state(model): return [p.detach().clone() for p in model.parameters()]


def by_step(A, name, policy):
    t, scaler = A.toy(name, steps=TOYS[name]), A.make_scaler(policy, **SCALERS[policy])
    step, opt, rows = A.make_step(scaler), t.opt(t.model.parameters()), []
    for batch in t.batches: rows.append([A.train(step, t.model, [batch], opt, t.loss_func), *state(t.model)])
    return rows


def by_learner(A, policy):
    import torch
    from fastai.basics import Callback
    t = A.toy('cnn', steps=1)
    torch.manual_seed(0); random.seed(0)
    g = torch.Generator().manual_seed(0)
    x, y = torch.rand(640, 1, 8, 8, generator=g), torch.randint(0, 10, (640,), generator=g)
    rows = []
    class Rows(Callback):
        order = 200
        def after_batch(self):
            if self.learn.training: rows.append([float(self.learn.loss), A.scale_of(self.learn), *state(self.learn.model)])
    scaler = A.make_scaler(policy, **SCALERS[policy])
    learn = A.make_learner(t.model, (x, y), (x[:64], y[:64]), scaler, bs=64, loss_func=t.loss_func, cbs=Rows())
    with learn.no_logging(): learn.fit_one_cycle(2, .01)
    return rows


def by_gradscaler(A, policy, fused):
    import torch
    t = A.toy('deep_sigmoid', steps=40)
    more = {} if A.FIRST else dict(model=t.model)
    scaler = A.make_gradscaler(A.make_scaler(policy, **SCALERS[policy]), **more)
    if A.FIRST and policy == 'als': scaler.attach(t.model)
    opt, rows = torch.optim.Adam(t.model.parameters(), lr=6e-3, fused=fused), []
    for xb, yb in t.batches:
        with torch.autocast('cpu', torch.float16): loss = t.loss_func(t.model(xb), yb)
        scaler.scale(loss).backward(); scaler.step(opt); scaler.update(); opt.zero_grad()
        rows.append([loss.item(), scaler.get_scale(), *state(t.model)])
    return rows


def by_masters(A, flat):
    t = A.toy('deep_sigmoid', steps=40)
    groups, masters = A.convert('masters', [list(t.model.parameters())], flat)
    A.convert('half', t.model)
    step = A.make_step(A.make_scaler('static', init_scale=2.**11), masters=(groups, masters, flat))
    opt, rows = t.opt(masters[0]), []
    for batch in t.batches:
        rows.append([A.train(step, t.model, [batch], opt, t.loss_func), *[m.detach().clone() for m in masters[0]]])
    return rows


def converted(A, what, *args):
    "Forward and backward of a converted model, three times (delayed scales have a memory)"
    t, rows = A.toy('deep_sigmoid' if what == 'unit' else 'cnn', steps=3), []
    model = A.convert(what, t.model, *args)
    for xb, yb in t.batches:
        model.zero_grad()
        out = model(xb); loss = t.loss_func(out, yb); loss.backward()
        rows.append([out.detach(), loss.detach(), *[p.grad.clone() for p in model.parameters()]])
    return rows


def storm(seed, n=60):
    "Which steps overflow, and the largest magnitude of the others"
    rnd = random.Random(seed)
    share = rnd.choice([.05, .15, .3])
    return [rnd.random() < share for _ in range(n)], [2.**rnd.randint(0, 15) for _ in range(n)]


def trace(A, policy, found, top):
    "The scales of a policy that starts at 2^40, so that no floor matters"
    takes = {} if policy in ('static', 'backoff', 'logmax', 'als') else dict(growth_interval=5)
    start = dict(logmax=2.**10, als=2.**16, apex_amp=2.**24).get(policy, 2.**40)
    kw = dict(als=dict(activations=False), backoff=dict(max_scale=2.**40)).get(policy, {})
    scales = A.next_scales(A.make_scaler(policy, init_scale=start, **takes, **kw), found, top)
    return [float(f'{s:.3g}') for s in scales] if policy == 'logmax' else scales     # sums in another order


def golden(A):
    "Traces of all policies on two storms"
    storms = [dict(zip(('found_inf', 'amax'), storm(seed))) for seed in (0, 1)]
    for s in storms: s['scales'] = {p: trace(A, p, s['found_inf'], s['amax']) for p in POLICIES}
    return storms


CASES = {**{f'step, {toy}, {s}': (by_step, toy, s) for toy in TOYS for s in SCALERS},
         **{f'callback, cnn, {s}': (by_learner, s) for s in SCALERS},
         **{f'gradscaler, deep_sigmoid, {s}{", fused"*f}': (by_gradscaler, s, f) for s in SCALERS for f in (False, True)},
         **{f'masters, flat={f}': (by_masters, f) for f in (False, True)},
         'unit_scale, deep_sigmoid': (converted, 'unit'),
         **{f'simulate_fp8, cnn, {r}': (converted, 'fp8', r) for r in ('current', 'delayed')},
         'scales of all policies': (lambda A: [[p, *s['scales'][p]] for s in golden(A) for p in POLICIES],)}


def run_cases(names, out):
    "What a process of either tree does"
    import torch, adapter as A
    torch.set_num_threads(1)
    warnings.simplefilter('ignore')
    done = {}
    for n in names:
        try: done[n] = CASES[n][0](A, *CASES[n][1:])
        except Exception as e: done[n] = f'{type(e).__name__}: {e}'
        print('.', end='', flush=True, file=sys.stderr)
    torch.save(done, out)


def equal(a, b):
    import torch
    if isinstance(a, torch.Tensor): return a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())
    if isinstance(a, (list, tuple)): return len(a) == len(b) and all(map(equal, a, b))
    return a == b or a != a and b != b


def verdict(old, new):
    "A sentence for two lists of rows; equal is the only good one"
    for who, rows in (('the first edition', old), ('this tree', new)):
        if isinstance(rows, str): return f'{who} raised {rows}'
    for i, (a, b) in enumerate(zip(old, new)):
        if not equal(a, b): return f'differs at step {i}'
    return 'equal' if len(old) == len(new) else f'{len(old)} steps there, {len(new)} here'


def compare(words):
    "Both trees, at the same time; the number of differences"
    import torch
    names = [n for n in CASES if not words or any(w in n for w in words)]
    trees = dict(old=first_edition(), new=ROOT)
    outs = {k: WORK/f'{k}.pt' for k in trees}
    procs = {k: python(t, Path(__file__), '--run', outs[k], *names) for k,t in trees.items()}
    bad = [k for k,p in procs.items() if p.wait()]
    print(file=sys.stderr)
    if bad: print(f'{", ".join(bad)}: the process ended with an error'); return len(bad)
    old, new = (torch.load(o, weights_only=False) for o in outs.values())
    said = {n: verdict(old[n], new[n]) for n in names}
    for n, v in said.items(): print(f'{n:40} {len(old[n]) if v == "equal" else "":>4} {v}')
    wrong = sum(v != 'equal' for v in said.values())
    print(f'{len(names) - wrong} of {len(names)} cases are bit for bit those of the first edition ({FIRST_EDITION}).')
    return wrong


def main(args):
    if args[:1] == ['--run']: return run_cases(args[2:], args[1])
    if args[:1] == ['--write']:
        import adapter as A
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(json.dumps(golden(A)).replace('], ', '],\n').replace('}, ', '},\n') + '\n')
        return print(f'{GOLDEN.relative_to(ROOT)} written')
    if args[:1] == ['--golden']: return python(first_edition(), Path(__file__), '--write').wait()
    if args[:1] == ['--promises']: return python(first_edition(), '-m', 'pytest', '-q', PROMISES, *args[1:]).wait()
    return int(compare(args) > 0)


if __name__ == '__main__': sys.exit(main(sys.argv[1:]))
