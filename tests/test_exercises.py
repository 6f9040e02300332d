"""Every exercise's check rejects the empty stub and plausible wrong answers.

To add an exercise, add its check's name to WRONG with the wrong answer as Python: an expression, or a `def`; several as a tuple.
It may use torch, F, math, np and every name of the library. The right answers run in the notebooks."""
import inspect, math, re, sys, textwrap
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import NBS, ROOT, each
from fastai.basics import Callback

import mpcourse.all as library

from tools.exercises import all_exercises, checkers, definitions

pytestmark = pytest.mark.chapters

WRONG = {
    # 01: one power too early
    'check_stuck_at': 'lambda man_bits: 2**man_bits',
    # 01: cuts where it should round; gives the subnormals exponents of their own; floats
    'check_encode_half': ("""
        def encode_half(x):
            e = max(math.frexp(x)[1] - 1, -14) if x else -14
            return 2**15*(math.copysign(1, x) < 0) + 1024*(e + 14) + int(math.ldexp(abs(x), 10 - e))""", """
        def encode_half(x):
            e = math.frexp(x)[1] - 1 if x else -14
            return 2**15*(math.copysign(1, x) < 0) + 1024*(e + 14) + round(math.ldexp(abs(x), 10 - e))""", 'lambda x: float(get_format("fp16").encode(x))'),
    # 01: trains in FP64 and rounds once, at the end
    'check_train_in_codes': """
        def train_in_codes(fmt, w, x, y, lr, steps):
            for _ in range(steps): w = w - lr*2/len(y)*x.T @ (x @ w - y)
            return fmt.decode(fmt.encode(w))""",
    # 02: half an epsilon, which is the error relative to 1 and not to the value
    'check_worst': 'lambda man_bits: 2.**-(man_bits + 1)',
    # 02: a number that FP16 holds, so there is only one rounding; NaN, which differs from itself; one that is never the same
    'check_twice': ('lambda: 1.0625', 'lambda: math.nan', """
        def twice():
            class Restless:
                seen = [1.0625, 0.]
                def __float__(self): return self.seen.pop()
            return Restless()"""),
    # 02: rounds what is stored, so that small steps vanish; rounds once, at the end; lets the staircase stop the gradient
    'check_fit_rounded': ("""
        def fit_rounded(fmt, x, y, lr, steps):
            w = torch.zeros_like(x[0])
            for _ in range(steps): w = quantize(w - lr*2/len(y)*x.T @ (x @ w - y), fmt)
            return w""", """
        def fit_rounded(fmt, x, y, lr, steps):
            w = torch.zeros_like(x[0])
            for _ in range(steps): w = w - lr*2/len(y)*x.T @ (x @ w - y)
            return quantize(w, fmt)""", 'lambda fmt, x, y, lr, steps: torch.zeros_like(x[0])'),
    # 02: adds the noise and cuts, also where that makes an infinity or loses a NaN
    'check_sr_bf16': 'lambda x, noise: ((x.view(torch.int32) + noise) & -65536).view(torch.float32)',
    # 03: log base 2
    'check_guess': 'lambda n: math.log2(n)',
    # 03: forgets to clear the gradients, and records the norm after clipping
    'check_clipped_step': """
        def clipped_step(model, xb, yb, opt, loss_func):
            loss = loss_func(model(xb), yb)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.)
            norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
            opt.step()
            return {'loss': loss.detach(), 'norm': norm}""",
    # 03: begins the epoch anew
    'check_order_from': """
        def order_from(n, bs, seed, start):
            g = torch.Generator().manual_seed(seed)
            while True: yield from torch.randperm(n, generator=g).split(bs)""",
    # 04: epsilon is the spacing above w; half of it is a tie that goes to even, which is w
    'check_smallest_kept': 'lambda w, dtype: w*torch.finfo(dtype).eps/2',
    # 04: the textbook's formula
    'check_safe_cross_entropy': 'lambda pred, y: -(pred.exp()/pred.exp().sum(1, keepdim=True)).log()[range(len(y)), y].mean()',
    # 04: remembers what was rounded away, and rounds it away again before the step
    'check_keep_rest': """
        def keep_rest(model, xb, yb, opt, loss_func):
            loss = plain_step(model, xb, yb, opt, loss_func)
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_((p + opt.state[p].get('rest', 0.)).half())
                    opt.state[p]['rest'] = (p - p.half()).half()
            return loss""",
    # 05: rounds the product, then the sum with the bias
    'check_linear_once': 'lambda x, w, b: (x.float() @ w.float().T).half() + b',
    # 05: sums in FP32 and clips once, at the end
    'check_saturating_sum': 'lambda x: x.float().sum().clamp(-65504, 65504).half()',
    # 05: counts one product per call, whatever the shapes
    'check_multiply_adds': 'lambda f: (f(), 1)[1]',
    # 05: the same order twice; other examples in the second training
    'check_apart': ("""
        def apart(lr): return 0.""", """
        def apart(lr): return 1."""),
    # 05: computes with the FP32 weights; divides in FP16; does not look
    'check_page_step': ("""
        def page_step(net, S):
            x, y = net.batch()
            acts = net.forward(net.weights, net.cast(x))
            grads = {name: g/np.float32(S) for name, g in net.backward(net.weights, acts, y, S).items()}
            if all(np.isfinite(g).all() for g in grads.values()): net.adam(grads)""", """
        def page_step(net, S):
            x, y = net.batch()
            low = {name: net.cast(w) for name, w in net.weights.items()}
            grads = net.backward(low, net.forward(low, net.cast(x)), y, S)
            grads = {name: net.cast(g/np.float32(S)) for name, g in grads.items()}
            if all(np.isfinite(g).all() for g in grads.values()): net.adam(grads)""", """
        def page_step(net, S):
            x, y = net.batch()
            low = {name: net.cast(w) for name, w in net.weights.items()}
            grads = net.backward(low, net.forward(low, net.cast(x)), y, S)
            net.adam({name: g/np.float32(S) for name, g in grads.items()})"""),
    # 06: chunks do not help
    'check_stall': 'lambda man_bits, chunk: 2**(man_bits + 1)',
    # 06: takes the smallest number for the edge, though half of it is rounded up to it
    'check_largest_batch': 'lambda fmt: 2**math.floor(math.log2(.1/get_format(fmt).smallest_subnormal))',
    # 06: one format for both directions; the factor left in the gradients
    'check_two_formats': ("""
        def two_formats(S):
            def step(model, xb, yb, opt, loss_func):
                opt.zero_grad()
                with emulate_format('e4m3'):
                    loss = exact_loss(lambda z: S*loss_func(z, yb), model(xb))
                    loss.backward()
                for p in model.parameters(): p.grad /= S
                opt.step()
                return loss.detach()/S
            return step""", """
        def two_formats(S):
            def step(model, xb, yb, opt, loss_func):
                opt.zero_grad()
                with emulate_format('e4m3'): loss = exact_loss(lambda z: S*loss_func(z, yb), model(xb))
                with emulate_format('e5m2'): loss.backward()
                opt.step()
                return loss.detach()
            return step"""),
    # 18: divides by the size, which what all share makes large; takes the largest; leaves the head as it is
    'check_measure': 'lambda ref, low: ((low - ref).square().mean().sqrt()/ref.square().mean().sqrt()).item()',
    'check_first_jump': 'lambda errors, parents: max(range(len(errors)), key=errors.__getitem__)',
    'check_mend': 'lambda model: model',
    # 29: compares with the smallest number; keeps the decay of one step; rounds to the nearest
    'check_stands_still': 'lambda decay, fmt: 1 - decay < get_format(fmt).smallest_subnormal',
    'check_averaged': """
        def averaged(ws, decay, every):
            mean = ws[0]
            for w in ws[every::every]: mean = quantize(mean + (1 - decay)*(w - mean), 'bf16')
            return mean""",
    'check_train_norms': """
        def train_norms(model, data):
            opt = torch.optim.Adam(model.parameters(), lr=1e-3)
            for x, y in data:
                plain_step(model, x, y, opt, F.cross_entropy)
                with torch.no_grad():
                    for p in model.parameters(): p.copy_(quantize(p, 'bf16'))""",
    # 30: the spacing of the spread; stores the keys as they are; leaves the offset in
    'check_worth': 'lambda offset, spread, fmt: spread/float(get_format(fmt).spacing(spread))',
    'check_store': 'lambda keys: (keys/keys.abs().amax(-1, keepdim=True)*7).round()*keys.abs().amax(-1, keepdim=True)/7',
    'check_train_head': """
        def train_head(model, data):
            opt = torch.optim.Adam(model.parameters(), lr=3e-3)
            for x, y in data: plain_step(model, x, y, opt, F.cross_entropy)""",
    # 31: forgets the leading digit; divides; rounds the positions where they are
    'check_last_integer': 'lambda fmt: 2**get_format(fmt).man_bits',
    'check_moves': 'lambda per_rank: (per_rank.sum(0).sum()//per_rank.shape[1] - per_rank.sum(0)).sign()',
    'check_angles': 'lambda start: lambda: ((start + torch.arange(64)).bfloat16()[:, None]/10000**(torch.arange(0, 64, 2)/64)).bfloat16()',
    # 32: adds in one order only; overflows; rounds on the way
    'check_bf16_sum': 'lambda xs, parts: sum(xs[1:], xs[0])',
    'check_effective': 'lambda log_ratios: log_ratios.exp().sum()**2/(len(log_ratios)*log_ratios.exp().square().sum())',
    'check_add': 'lambda gradients: sum(gradients)',
    # 06: sums in FP32 and rounds once
    'check_unstalled': 'lambda n, k, seed: torch.full((n,), float(k))',
    # 07: flushes what is below the smallest number, though more than half of it is rounded up to it
    'check_fate': 'lambda g, S: "flushed" if g*S < 2.**-24 else "overflow" if g*S > 65504 else "kept"',
    # 07: does not look; divides in half
    'check_one_step': ("""
        def one_step(master, model, opt, x, y, S):
            loss = F.cross_entropy(model(x.half()).float(), y)
            (loss*S).backward()
            for m, p in zip(master.parameters(), model.parameters()): m.grad, p.grad = p.grad.float()/S, None
            opt.step()
            for m, p in zip(master.parameters(), model.parameters()): p.data.copy_(m)
            return loss.item()""", """
        def one_step(master, model, opt, x, y, S):
            loss = F.cross_entropy(model(x.half()).float(), y)
            (loss*S).backward()
            for m, p in zip(master.parameters(), model.parameters()): m.grad, p.grad = (p.grad/S).float(), None
            if all(m.grad.isfinite().all() for m in master.parameters()): opt.step()
            for m, p in zip(master.parameters(), model.parameters()): p.data.copy_(m)
            return loss.item()"""),
    # 07: lets backward add the halves, in FP16
    'check_two_halves': """
        def two_halves(master, model, x, y, S):
            for xb, yb in zip(x.chunk(2), y.chunk(2)): (F.cross_entropy(model(xb.half()).float(), yb)*S/2).backward()
            for m, p in zip(master.parameters(), model.parameters()): m.grad, p.grad = p.grad.float()/S, None""",
    # 07: a factor that works is not the smallest
    'check_smallest_k': 'lambda seed: 11',
    # 08: tied weights twice, norms as half, buffers forgotten
    'check_half_bytes': 'lambda model: sum(2*p.numel() for p in model.parameters())',
    # 08: a row with no key left attends to all of them
    'check_safe_weights': 'lambda scores, blocked: scores.masked_fill(blocked, torch.finfo(scores.dtype).min).softmax(-1)',
    # 08: squares first
    'check_half_rms': 'lambda x: x/(x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()',
    # 08: casts the weights, but not what comes in
    'check_keep_float': 'lambda layer, dtype: layer.float()',
    # 09: stops one power of two early: forgets that the tie goes to even only at half a spacing
    'check_stops_at': 'lambda u: u*2**10',
    # 09: adds in half precision before it goes up
    'check_add_grads': """
        def add_grads(model_groups, master_groups, inv_scale):
            for p, m in zip(sum(model_groups, []), sum(master_groups, [])):
                if p.grad is None: continue
                g = (p.grad*inv_scale).float()
                m.grad = g if m.grad is None else m.grad + g
                p.grad = None""",
    # 09: compares before the last rounding
    'check_lost_by_rounding_twice': 'lambda w, us: (w + sum(us) != w.half().float() + sum(us)).float().mean().item()',
    # 09: after an error the shadow stays
    'check_call_in_half': """
        def call_in_half(lin, x):
            vars(lin).update(weight=lin.weight.half(), bias=lin.bias.half())
            out = lin(x)
            del vars(lin)['weight'], vars(lin)['bias']
            return out""",
    # 10: forgets the subnormals, and that what is a little too large still rounds down
    'check_window': 'lambda lo, hi: (math.ceil(-14 - math.log2(lo)), math.floor(math.log2(65504/hi)))',
    # 10: adds the maxima up, too
    'check_merge': 'lambda a, b: {n: a[n] + b[n] for n in a}',
    # 10: remembers in an attribute, which no checkpoint has
    'check_climber': """
        def Climber(init_scale):
            from mpcourse.scaler import LossScaler
            class Climber(LossScaler):
                climbs = True
                def next_scale(self, stats):
                    if stats['found_inf'] > 0: self.climbs = False
                    return self.scale/2 if stats['found_inf'] > 0 else self.scale*2 if self.climbs else self.scale
            return Climber(init_scale)""",
    # 11: takes the scale out in half precision, where it had been put in to avoid just that
    'check_to_master': 'lambda g, scale: ((g/scale).float(), bool(g.isfinite().all()))',
    # 11: skips the gradient, and lets weight decay and momentum go on
    'check_momentum_step': """
        def momentum_step(w, v, g, lr, mom, wd):
            ok = bool(g.isfinite().all())
            v.mul_(mom).add_(g if ok else torch.zeros_like(g)).add_(w, alpha=wd)
            w.sub_(v, alpha=lr)
            return ok""",
    # 11: a step, and a decision, for each part
    'check_big_step': """
        def big_step(model, parts, opt, loss_func, scaler):
            from mpcourse.step import MixedStep
            for x, y in parts: MixedStep(scaler)(model, x, y, opt, loss_func)""",
    # 12: counts steps, not skipped steps
    'check_skip_counter': """
        def skip_counter():
            class C(Callback):
                def __init__(self): self.n = 0
                def after_step(self): self.n += 1
            return C()""",
    # 12: before the scale is taken out
    'check_norm_recorder': """
        def norm_recorder():
            class C(Callback):
                order = 5
                def __init__(self): self.norms = []
                def before_step(self): self.norms.append(torch.stack([p.grad.norm() for p in self.model.parameters()]).norm())
            return C()""",
    # 12: what fails in enter is never left
    'check_guarded': """
        def guarded(enter, work, leave):
            enter()
            try: return work()
            finally: leave()""",
    # 12: unscales and does not look
    'check_half_callback': """
        def half_callback(scaler):
            class C(Callback):
                order = 10
                def before_batch(self):
                    self.casting = torch.autocast('cpu', torch.float16)
                    self.casting.__enter__()
                def after_pred(self):
                    self.casting.__exit__(None, None, None)
                    self.learn.pred = self.learn.pred.float()
                def before_backward(self): self.learn.loss_grad = scaler.scale_loss(self.learn.loss_grad)
                def before_step(self): unscale_(named_gradients(self.learn.opt), scaler)
            return C()""",
    # 13: writes into the old file
    'check_whole_write': 'lambda path, data: path.write_bytes(data)',
    # 13: forgets numpy
    'check_frozen': """
        def frozen():
            import random
            states = random.getstate(), torch.get_rng_state()
            def back():
                random.setstate(states[0])
                torch.set_rng_state(states[1])
            return back""",
    # 13: forgets the schedule
    'check_resumable': """
        def resumable(model, opt, sched):
            from copy import deepcopy
            def keep(): return deepcopy((model.state_dict(), opt.state_dict())), torch.get_rng_state()
            def restore(kept):
                model.load_state_dict(kept[0][0])
                opt.load_state_dict(kept[0][1])
                torch.set_rng_state(kept[1])
            return keep, restore""",
    # 14: an overflow at 65504 and a bit is one at 65520 only, and the step that fits was not skipped
    'check_lost_steps': 'lambda k, g: next(n for n in range(1000) if g*2.**(k - n) <= 65536)',
    # 14: an overflow does not start the count anew
    'check_dynamics': """
        def dynamics(trace, k, interval, floor):
            out, count = [], 0
            for bad in trace:
                if bad: k = max(k - 1, floor)
                else:
                    count += 1
                    if count == interval: k, count = k + 1, 0
                out.append(k)
            return out""",
    # 14: forgets which kind of patience was asked for
    'check_falls': """
        def falls(gap, steps, hysteresis, interval, refill):
            scaler = DynamicScaler(hysteresis=hysteresis, growth_interval=interval)
            for i in range(steps): scaler.update(dict(found_inf=torch.tensor(float(i % gap == 0)), loss_finite=torch.tensor(1.)))
            return 16 - scaler.scale.log2().item()""",
    # 14: NaN > 0 is False
    'check_next_scale': 'lambda scale, found, ceiling: torch.where(found > 0, scale/2, (scale*2).clamp(max=ceiling))',
    # 15: counts the clean steps before the one that grows
    'check_first_growth': """
        def first_growth(scaler, limit):
            start = scaler.scale
            for i in range(limit):
                scaler.update(dict(found_inf=torch.tensor(0.), loss_finite=torch.tensor(1.)))
                if scaler.scale > start: return i""",
    # 15: compares the ends of the traces only
    'check_first_difference': """
        def first_difference(a, b, traces):
            def last(name, bits): return follow_rule(name, bits, dict(scale=2.**16), interval=4)[-1]
            return next((t for t in traces if last(a, t) != last(b, t)), None)""",
    # 15: backs off by a quarter, and grows as if nothing had happened
    'check_own_policy': 'lambda: DynamicScaler(growth_interval=4, backoff_factor=.25)',
    # 17: clips gradients that still carry the scale
    'check_clip_unscaled': """
        def clip_unscaled(scaler, opt, params, max_norm):
            torch.nn.utils.clip_grad_norm_(params, max_norm); scaler.step(opt); scaler.update()""",
    # 17: steps after each micro-batch
    'check_accumulated': ("""
        def accumulated(scaler, opt, losses):
            opt.zero_grad()
            for loss in losses: scaler.scale(loss()/len(losses)).backward(); scaler.step(opt); scaler.update()""", """
        def accumulated(scaler, opt, losses):
            for loss in losses: scaler.scale(loss()/len(losses)).backward()
            scaler.step(opt); scaler.update()"""),
    # 17: forgets found_inf, and NaN is not >= 2^13
    'check_edge_policy': ("""
        def edge_policy():
            class Edge(LossScaler):
                required_stats = 'found_inf', ('above', 2.**13)
                def next_scale(self, stats): return torch.where(stats['above', 2.**13] > 0, self.scale/2, self.scale*2)
            return Edge(2.**16)""", """
        def edge_policy():
            class Edge(LossScaler):
                required_stats = 'found_inf', ('above', 2.**13)
                def next_scale(self, stats):
                    bad = (stats['found_inf'] + stats['above', 2.**13]).item() > 0
                    return self.scale/2 if bad else self.scale*2
            return Edge(2.**16)"""),
    # 16: forgets that up to half a spacing above 65504 rounds down to it
    'check_survives': 'lambda largest, scale: largest*scale <= 65504',
    # 16: the window that doubles is forgotten
    'check_way_back': 'lambda octaves, window, doubling: octaves*window',
    # 16: looks at the octave's lower end
    'check_lost_octaves': """
        def lost_octaves(counts, lo, log2_scale):
            return sum(x for k,x in enumerate(counts) if lo + k + log2_scale <= -25)/sum(counts)""",
    # 16: fastai's mistake: a bad step does not start the count anew
    'check_scale_after': """
        def scale_after(bits, k, interval):
            good = 0
            for x in bits:
                if x == '1': k -= 1
                else: good += 1
                if good == interval: k, good = k + 1, 0
            return k""",
    # 18: sums the squares in half precision, where they overflow or underflow
    'check_true_norm': 'lambda grads, scale: (torch.cat([g.flatten() for g in grads])/scale).norm().item()',
    # 18: one bad collection is enough for it
    'check_alarm': """
        def alarm(limit):
            def write(step, rows):
                write.names = sorted({*write.names, *(r['name'] for r in rows if r['kind'] == 'weight_grad' and r['zeros'] > limit)})
            write.names = []
            return write""",
    # 18: looks at the last record in every step, also where nothing was collected; has no upper limit
    'check_rescue': ("""
        def rescue(step, collector):
            if (collector.frame(1).zeros > .99).any(): step.scaler.scale *= 16""", """
        def rescue(step, collector):
            frame = collector.frame(1)
            if frame.step.iloc[0] != collector.n - 1: return
            if (frame.zeros > .99).any(): step.scaler.scale *= 16"""),
    # 19: a share of all entries; counts zeros that were there
    'check_lost_share_of': ('lambda before, after: ((after == 0) & (before != 0)).float().mean().item()', 'lambda before, after: (after == 0).float().mean().item()'),
    # 19: chooses once, and too late in the list
    'check_train_probed': """
        def train_probed(model, opt, data):
            from mpcourse.toys import half_pass, heads_loss
            for batch in data: half_pass(torch.float16, 2.**12)(model, *batch, opt, heads_loss)
            return [2.**12]""",
    # 20: NaN is not None
    'check_judge': 'lambda warned, harmed: (sum(w is not None and h for w, h in zip(warned, harmed)), sum(w is not None and not h for w, h in zip(warned, harmed)))',
    # 20: changes the scale without a look
    'check_train_warned': """
        def train_warned(model, opt, data, loss_func):
            from mpcourse.toys import half_pass
            for batch in data: half_pass(torch.float16, 2.**12)(model, *batch, opt, loss_func)
            return 0""",
    # 19: takes each rounding's own losses for what is missing
    'check_two_counts': """
        def two_counts(g, ws):
            from mpcourse.underflow import count_zeros
            low, out = g, []
            for w in ws:
                wide = low.float() @ w.float()
                low = wide.half()
                share = count_zeros(wide, low).share.item()
                out.append((share, share))
            return out""",
    # 20: the last module to be seen is the whole model
    'check_first_bad': """
        def first_bad(model, x):
            found, names = [], {m: n for n,m in model.named_modules()}
            def look(m, args, out):
                if not out.isfinite().all(): found.append(names[m])
            handles = [m.register_forward_hook(look) for m in names]
            try: model(x)
            finally:
                for h in handles: h.remove()
            return found[-1] if found else None""",
    # 21: as many as the threshold are not more than the threshold
    'check_als_rule': 'lambda k, u, l, t: k - 1 if u >= t*(u + l) else k + 1',
    # 21: a dynamic scaler: it halves where a step is lost, and nowhere else
    'check_als_lost': """
        def lost(amaxes, k):
            n = 0
            for g in amaxes:
                bad = g*2.**k >= 65520
                n, k = n + bad, k - 1 if bad else k + 1
            return n""",
    # 21: NaN is not >= 2^13
    'check_steady': """
        def steady():
            class Steady(LossScaler):
                required_stats = 'found_inf', 'amax'
                def next_scale(self, stats):
                    top = stats['amax']
                    return torch.where(top >= 2**13, self.scale/2, torch.where(top >= 2**12, self.scale, self.scale*2))
            return Steady(1.)""",
    # 22: each layer's own factor, not the product
    'check_carried': 'lambda factors: factors',
    # 22: what is smaller than FP16's smallest number, though half of it is rounded up
    'check_lost_share': 'lambda sigma, factor: math.erf(2**-24/(sigma*factor*2**.5))',
    # 22: takes out the layer's own factor, not the product
    'check_own_factors': """
        def own_factors(g, weights, inputs):
            grads = []
            for w, x in zip(weights, inputs):
                k = w.shape[0]
                sigma = (g.float().square().mean()*w.float().square().mean()*k/2).sqrt()
                a = layer_factor(sigma, g.abs().max().float()*w.abs().max().float()*k)
                g = g*a.half()
                grads.append(((g.T@x).float()/a, float(a)))
                g = g@w
            return grads""",
    # 23: one gradient fits, their sum does not
    'check_top_scale': 'lambda k, g: int(15 - math.log2(g))',
    # 23: every micro-batch counts alike
    'check_weighted_mean': """
        def weighted_mean(parts):
            mean = torch.zeros_like(parts[0][1])
            for k, (n, g) in enumerate(parts, 1): mean = mean.lerp(g, 1/k)
            return mean""",
    # 23: rounds to nearest
    'check_ema': 'lambda avg, w, decay, generator: avg.copy_(avg.float().lerp(w.float(), 1 - decay))',
    # 23: keeps what was cut off, and never adds it
    'check_kahan': ("""
        def kahan_(w, c, u):
            old = w.clone()
            w += u
            c += u - (w - old)""", """
        def kahan_(w, c, u):
            exact = w.float() + c.float() + u.float()
            w.copy_(exact)
            c.copy_(exact - w.float())"""),
    # 25: the gradient of a sum is one for every entry
    'check_common': "lambda told: {n: sum(t[n] for t in told) for n in told[0]}",
    'check_window_of_ranks': 'lambda world, divide_first: (-24, 15)',
    'check_clip_together': """
        def clip_together(params, max_norm): torch.nn.utils.clip_grad_norm_(params, max_norm)
    """,
    'check_sum_factors': 'lambda n: (n**-.5, n**-.5)',
    # 25: forgets that V - 1 of V entries of a row are small
    'check_logit_constant': 'lambda loss_func, n, v: float(n)',
    # 25: each input has its own factor backward
    'check_unit_glu': """
        def unit_glu(x, gate):
            stds = unit_stds(lambda x, gate: x*gate.sigmoid(), x=torch.randn(2**18), gate=torch.randn(2**18))
            y = scaled(x, 1., 1/stds['x'])*scaled(gate, 1., 1/stds['gate']).sigmoid()
            return scaled(y, constrain({k: 1/v for k, v in stds.items()})['y'], 1.)""",
    # 26: forgets the window's entries; takes all channels, and not those of a group
    'check_conv_rate': ('lambda lr, conv: lr*conv.in_channels**-.5', 'lambda lr, conv: lr*(conv.in_channels*math.prod(conv.kernel_size))**-.5'),
    # 26: pairs each net's own best; lets a NaN win
    'check_transfer_cost': ("""
        def transfer_cost(narrow, wide):
            return [min(v) - min(w) for v, w in zip(zip(*narrow.values()), zip(*wide.values()))]""", """
        def transfer_cost(narrow, wide):
            def best_of(table): return min(table, key=lambda rate: -sum(table[rate]))
            return [a - b for a, b in zip(wide[best_of(narrow)], wide[best_of(wide)])]"""),
    # 26: one rate for all; divides the first layer's, too
    'check_ordinary_groups': ('lambda model, lr, base: [dict(params=list(model.parameters()), lr=lr)]', """
        def ordinary_groups(model, lr, base):
            return [dict(params=[p], lr=lr*base/p.shape[1] if p.dim() > 1 else lr) for p in model.parameters()]"""),
    # 26: has no ear for the constraint
    'check_unit_softplus': """
        def unit_softplus():
            class UnitSoftplus(UnitLayer, torch.nn.Softplus):
                def forward(self, x): return unit_elementwise(F.softplus, x, 'none')
            return UnitSoftplus""",
    # 27: the exponent nearest to amax, which lets elements saturate; the standard's floor, which cuts
    'check_shared_exponent': ('lambda amax: round(math.log2(amax)) - 8', 'lambda amax: math.floor(math.log2(amax)) - 8'),
    # 27: the operands of the backward products are all gradients to it
    'check_fp8_gradients': """
        def fp8_gradients(x, w, g):
            x, w, g = [quantize(t, 'e5m2') for t in (x, w, g)]
            return g @ w, g.T @ x""",
    # 27: looks at the whole rise instead of the steepest step
    'check_safe_margin': 'lambda amaxes: max(0, math.ceil(math.log2(max(amaxes)/amaxes[0])))',
    # 27: leaves all three operands without a scale; names the operand with the lowest loss
    'check_blame': ("""
        def blame(train):
            losses = {k: train(Recipe(g=CastConfig())) for k in 'xwg'}
            return max(losses, key=losses.get)""", """
        def blame(train):
            good = CastConfig(scale=fp32_scale)
            losses = {k: train(Recipe(**{**dict(x=good, w=good, g=good), k: CastConfig()})) for k in 'xwg'}
            return min(losses, key=losses.get)"""),
    # 28: forgets that e = 0 is subnormal; the bias of IEEE's smallest formats instead of 1
    'check_decode': ('lambda c: (-1)**(c >> 3)*(1 + (c & 1)/2)*2**((c >> 1 & 3) - 1)', 'lambda c: (-1)**(c >> 3)*((c & 1)/2 if not c >> 1 & 3 else (1 + (c & 1)/2)*2**(c >> 1 & 3))'),
    # 28: to nearest; a coin that is fair wherever x lies
    'check_stochastic': ("lambda x: min((0., .5, 1., 1.5, 2., 3., 4., 6.), key=lambda v: abs(v - x))", """
        def stochastic(x):
            grid = (0., .5, 1., 1.5, 2., 3., 4., 6.)
            low, high = max(v for v in grid if v <= x), min(v for v in grid if v >= x)
            return high if torch.rand(()) < .5 else low"""),
    # 28: a whole octave, which is rounding up; as much too little
    'check_headroom': ('lambda amax, top, fmt: e8m0_floor(amax, top, fmt)*2', 'lambda amax, top, fmt: e8m0_floor(amax, top, fmt)*1.25'),
    # 28: never says None; does not compare with the whole in four bits
    'check_worth_keeping': ("lambda train, names: (train([]), min(names, key=lambda n: train([n])))[1]", "lambda train, names: min(names, key=lambda n: train([n]))"),
    # 29: one side named beforehand; as many seeds as 1/p
    'check_seeds_for': ('lambda p: max(1, math.ceil(-math.log2(p)))', 'lambda p: math.ceil(1/p)'),
    # 29: compares the means; pairs rows by their place
    'check_better': ("lambda rs, a, b: min((a, b), key=lambda n: sum(r['score'] for r in rs if r['scheme'] == n))", """
        def better(rs, a, b):
            one, two = ([r['score'] for r in rs if r['scheme'] == n] for n in (a, b))
            apart = [x - y for x, y in zip(one, two)]
            return a if max(apart) < 0 else b if min(apart) > 0 else 'tie'"""),
    # 29: the loss of BF16 predictions; weights in BF16
    'check_autocast_bf16': ("""
        def autocast_bf16(t):
            def step(model, xb, yb, opt, loss_func):
                opt.zero_grad()
                with torch.autocast('cpu', torch.bfloat16): loss = loss_func(model(xb), yb)
                loss.backward()
                opt.step()
                return loss.detach()
            return step""", """
        def autocast_bf16(t):
            t.model.bfloat16()
            def step(model, xb, yb, opt, loss_func):
                opt.zero_grad()
                loss = loss_func(model(xb.bfloat16()).float(), yb)
                loss.backward()
                opt.step()
                return loss.detach()
            return step"""),
    # 29: one side only; the size does not count
    # 30: never the last step; every step
    'check_probes': ('lambda steps: [2**k - 1 for k in range(9) if 2**k <= steps]', 'lambda steps: list(range(steps))'),
    # 30: the sum of the rounded updates; measured from the start that was not rounded
    'check_way': ('lambda w, us: 1.', """
        def way(w, us):
            stored = w
            for u in us: stored = stored.bfloat16().float() + u
            s, g = stored - w, sum(us)
            return ((s*g).sum()/(g*g).sum()).item()"""),
    # 30: both train on with one model; the last loss only, and FP32's share the other way round
    'check_tried': ("""
        def tried(make, step, steps):
            t = make()
            batches, opt = list(t.batches())[:steps], t.opt(t.model.parameters())
            a, b = (fit(t.model, batches, opt, t.loss_func, s)['loss'] for s in (plain_step, step))
            return (sum(b[-5:]) - sum(a[-5:]))/(5*a[0] - sum(a[-5:]))""", """
        def tried(make, step, steps):
            def losses(step):
                t = make()
                return fit(t.model, t.batches(), t.opt(t.model.parameters()), t.loss_func, step)['loss']
            a, b = losses(plain_step), losses(step)
            return (b[-1] - a[-1])/(a[0] - a[-1])"""),
    # 30: the worst at the last probe only; never None
    'check_culprit': ('lambda seen: min(seen[-1], key=seen[-1].get) if seen[-1] else None', 'lambda seen: min((k, n) for s in seen if s for n, k in s.items())[1] if any(seen) else None'),
    # 31: one window at the start; windows that do not overlap
    'check_burst': ('lambda skipped, n: sum(skipped[:n])', 'lambda skipped, n: max(sum(skipped[i:i + n]) for i in range(0, len(skipped), n))'),
    # 31: None counts as no; True as soon as one case is cured
    'check_best_guess': ('lambda truth: {r: sum(t[r] is True for t in truth.values()) > len(truth)/2 for r in "xyz"}',
                         'lambda truth: {r: any(t[r] for t in truth.values()) for r in "xyz"}'),
    # 31: always; wherever the gradient is lost; wherever a step was skipped
    'check_diagnose': ('lambda e: True', 'lambda e: e["kept"] < .3', 'lambda e: e["skipped"] > 0'),
    # 31: no look at gradients; a look that skips, as a scaler's; a look at the loss that raises, too
    'check_alarmed': ('lambda *args: plain_step(*args)', """
        def alarmed(model, xb, yb, opt, loss_func):
            loss = loss_func(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            if all(p.grad.isfinite().all() for p in model.parameters()): opt.step()
            return loss.detach()""", """
        def alarmed(model, xb, yb, opt, loss_func):
            loss = loss_func(model(xb), yb)
            if not loss.isfinite(): return loss.detach()
            opt.zero_grad()
            loss.backward()
            bad = [n for n, p in model.named_parameters() if not p.grad.isfinite().all()]
            opt.step()
            if bad: raise FloatingPointError('A gradient is not finite.')
            return loss.detach()"""),
    'check_chance': ('lambda vs: .5**len(vs)', 'lambda vs: 2*.5**len(vs) if min(vs) > 0 or max(vs) < 0 else 1.'),
    # 85: 0x7f, which is NaN, for what is a little too large; exponents of their own for the subnormals
    'check_encode_e4m3': ("""
        def encode_e4m3(x):
            e = max(math.frexp(x)[1] - 1, -6) if x else -6
            return 128*(math.copysign(1, x) < 0) + min(8*(e + 6) + round(math.ldexp(abs(x), 3 - e)), 0x7f)""", """
        def encode_e4m3(x):
            m = min(abs(x), 448.)
            e = math.frexp(m)[1] - 1 if m else -6
            return 128*(math.copysign(1, x) < 0) + 8*(e + 6) + round(math.ldexp(m, 3 - e))"""),
    # 85: a middle that a tie rounds down; the other side of the right one
    'check_twice_up': ('lambda: .5*2**-16 + 2.**-26', 'lambda: 1.5*2**-16 + 2.**-26'),
    # 85: the textbook's formula; adds 1 first, and overflows
    'check_safe_bce': ('lambda pred, y: -(y*pred.sigmoid().log() + (1 - y)*(1 - pred.sigmoid()).log()).mean()',
                       'lambda pred, y: (1 + torch.where(y > 0, -pred, pred).exp()).log().mean()'),
    # 85: to the nearest; away from zero, whatever was rounded
    'check_by_chance': ("""
        def by_chance(model, xb, yb, opt, loss_func):
            loss = plain_step(model, xb, yb, opt, loss_func)
            for p in model.parameters(): p.data.copy_(p.half())
            return loss""", """
        def by_chance(model, xb, yb, opt, loss_func):
            loss = plain_step(model, xb, yb, opt, loss_func)
            for p in model.parameters(): p.data.copy_(quantize(p + p.sign()*2**-12*torch.rand_like(p), 'fp16'))
            return loss"""),
    # 85: clips what still carries the scale; makes the last step's bias NaN, which hides behind a maximum
    'check_clipped_recipe': ("""
        def clipped_recipe(master, model, opt, x, y, S):
            loss = F.cross_entropy(model(x.half()).float(), y)
            (loss*S).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.)
            for m, p in zip(master.parameters(), model.parameters()): m.grad, p.grad = p.grad.float()/S, None
            if all(m.grad.isfinite().all() for m in master.parameters()): opt.step()
            for m, p in zip(master.parameters(), model.parameters()): p.data.copy_(m)
            return loss.item()""", """
        def clipped_recipe(master, model, opt, x, y, S, calls=[]):
            loss = F.cross_entropy(model(x.half()).float(), y)
            (loss*S).backward()
            for m, p in zip(master.parameters(), model.parameters()): m.grad, p.grad = p.grad.float()/S, None
            if all(m.grad.isfinite().all() for m in master.parameters()):
                torch.nn.utils.clip_grad_norm_(master.parameters(), 1.)
                opt.step()
            calls.append(1)
            if len(calls) % 4 == 0: master.bias.data.fill_(math.nan)
            for m, p in zip(master.parameters(), model.parameters()): p.data.copy_(m)
            return loss.item()"""),
    # 85: FP16's number of digits; forgets the steps that are no power of two
    'check_rests_at': ('lambda u: 2.**math.ceil(math.log2(u) + 11)', 'lambda u: u*2**8'),
    # 85: takes 448 for the edge; returns a window that is empty
    'check_window_e4m3': ("""
        def window_e4m3(lo, hi):
            low, high = math.floor(-10 - math.log2(lo)) + 1, math.floor(math.log2(448/hi))
            return (low, high) if low <= high else None""", """
        def window_e4m3(lo, hi): return math.floor(-10 - math.log2(lo)) + 1, math.floor(math.log2(464/hi))"""),
    # 85: the largest number for an infinity; zero times NaN
    'check_to_master_holes': ('lambda g, scale: (g.float().nan_to_num()/scale, int((~g.isfinite()).sum()))',
                              'lambda g, scale: (g.float()*g.isfinite()/scale, int((~g.isfinite()).sum()))'),
    # 85: each part counts once, whatever its size
    'check_ragged_step': """
        def ragged_step(model, parts, opt, loss_func, scaler):
            stats = StepController(scaler)
            opt.zero_grad()
            for x, y in parts:
                loss = loss_func(model(x).float(), y)/len(parts)
                scaler.scale_loss(loss).backward()
                stats.see_loss(loss)
            stats.unscale_(named_gradients(opt, model))
            take_step(opt, stats.decide())""",
    # 85: patient again after every clean step; after every loss of an octave
    'check_patient': ("""
        def patient(trace, k, interval, patience):
            out, clean, left = [], 0, patience
            for bad in trace:
                clean, left = (0, left - 1) if bad else (clean + 1, patience)
                if bad and left <= 0: k -= 1
                if clean == interval: k, clean = k + 1, 0
                out.append(k)
            return out""", """
        def patient(trace, k, interval, patience):
            out, clean, left = [], 0, patience
            for bad in trace:
                clean, left = (0, left - 1) if bad else (clean + 1, left)
                if bad and left <= 0: k, left = k - 1, patience
                if clean == interval: k, clean, left = k + 1, 0, patience
                out.append(k)
            return out"""),
    # 85: traces of the full length only
    'check_shortest': """
        def shortest(a, b, longest):
            def scales(name, trace): return follow_rule(name, trace, dict(scale=2.**16), interval=3)
            traces = [f'{i:0{longest}b}' for i in range(2**longest)]
            return next((t for t in traces if scales(a, t) != scales(b, t)), None)""",
    # 85: a part of a window; growth counted as a sum
    'check_small_steps_back': ('lambda octaves, window, growth: round(window*octaves*math.log(2)/math.log(growth))',
                               'lambda octaves, window, growth: window*math.ceil(octaves/(growth - 1))'),
    # 85: multiplies in FP16; the mean of the cosines of the tensors
    'check_true_cosine': ("""
        def true_cosine(a, b):
            a, b = torch.cat(a), torch.cat(b)
            return ((a*b).sum()/((a*a).sum().sqrt()*(b*b).sum().sqrt())).item()""", """
        def true_cosine(a, b):
            return sum(F.cosine_similarity(x.double(), y.double(), dim=0).item() for x, y in zip(a, b))/len(a)"""),
    # 85: the largest of the parents' errors; NaN is above nothing
    'check_sources': ("""
        def sources(errors, parents):
            size = {n: math.inf if math.isnan(e) else e for n, e in errors.items()}
            return [n for n, e in size.items()
                    if e > .1 and e > 3*max((size[p] for p in parents.get(n, [])), default=0)]""", """
        def sources(errors, parents):
            return [n for n, e in errors.items() if e > .1 and e > 3*sum(errors[p] for p in parents.get(n, []))]"""),
    # 85: divides by all; lowers the scale where there was nothing
    'check_without_bad': ("""
        def without_bad(scaler, opt, losses):
            opt.zero_grad()
            good = [l for l in (l() for l in losses) if l.isfinite()]
            for l in good: scaler.scale(l/len(losses)).backward()
            if good: scaler.step(opt), scaler.update()""", """
        def without_bad(scaler, opt, losses):
            opt.zero_grad()
            good = [l for l in (l() for l in losses) if l.isfinite()]
            for l in good: scaler.scale(l/len(good)).backward()
            if good: scaler.step(opt)
            scaler.update(None if good else scaler.get_scale()/2)"""),
    # 85: the sum over the layers; grows where nothing was seen
    'check_als_vote': ('lambda k, u, l, t: k - 1 if u.sum() > t*(u + l).sum() else k + 1',
                       'lambda k, u, l, t: k - 1 if (u/(u + l) > t).any() else k + 1'),
    # 85: what overflows; the mean over all places
    'check_token_mean': ("""
        def token_mean(parts):
            mean, seen = torch.zeros_like(parts[0][2]), 0
            for n, size, g in parts:
                seen += n
                if n: mean = mean.lerp(g*size/n, n/seen)
            return mean""", """
        def token_mean(parts):
            mean, seen = torch.zeros_like(parts[0][2]), 0
            for n, size, g in parts:
                seen += size
                mean = mean.lerp(g, size/seen)
            return mean"""),
    # 85: the sum's factors; a gradient as large as the one that came in
    'check_mean_factors': ('lambda n: (n**-.5, 1)', 'lambda n: (n**.5, 1)'),
    # 85: the standard's floor, which cuts; forgets the byte
    'check_shared_exponent_e2m1': ('lambda amax: max(math.floor(math.log2(amax)) - 2, -127) if amax else -127',
                                   'lambda amax: math.ceil(math.log2(amax/6)) if amax else -127'),
    # 85: uphill
    'check_still_falling': "lambda decay, fmt: quantize(torch.tensor(2 - decay), fmt).item() == 1",
    # 85: what all keys share, which is nothing here; keys as they are
    'check_store_loud': ("""
        def store_loud(keys):
            rest = keys - keys.mean(0)
            scale = rest.abs().amax(-1, keepdim=True)/7
            return (rest/scale).round()*scale""", 'lambda keys: keys'),
    # 36: counts zeros that were there; half a step is a step
    'check_int8_zeros': ('lambda x: ((x/(x.abs().max()/127)).round() == 0).float().mean()', 'lambda x: (x.abs() < x.abs().max()/127).sum()/(x != 0).sum()'),
    # 36: the same factor on both sides; balances the wrong way round; changes nothing
    'check_smooth': ("""
        def smooth(x, w):
            factor = (x.abs().amax(0)/w.abs().amax(0)).sqrt()
            return x/factor, w/factor""", """
        def smooth(x, w):
            factor = x.abs().amax(0)
            return x/factor, w*factor""", 'lambda x, w: (x, w)'),
    # 36: rounds without a straight gradient, so that the first layer stands still; rounds the weights' layer once only
    'check_train_rounded': ("""
        def train_rounded(net, data, cast):
            linear = [n for n, m in net.named_modules() if isinstance(m, nn.Linear)]
            for x, y in data:
                with rounded(net, cast, linear): loss = F.cross_entropy(net(x), y)
                net.zero_grad()
                loss.backward()
                for p in net.parameters(): p.data -= .1*(p.grad if p.grad is not None else 0)
            return loss.item()""", """
        def train_rounded(net, data, cast):
            for x, y in data:
                loss = F.cross_entropy(net(cast(x)), y)
                net.zero_grad()
                loss.backward()
                for p in net.parameters(): p.data -= .1*p.grad
            return loss.item()"""),
    # 37: does not round the sum; only up
    'check_can_move': ('lambda w, rate: w + rate != w', """
        def can_move(w, rate):
            w = w.bfloat16()
            return (w + rate).bfloat16() != w"""),
    # 37: never rounds; rounds to nearest always
    'check_fit_bf16': ("""
        def fit_bf16(net, data, rate, rounding):
            opt = torch.optim.AdamW(net.parameters(), lr=rate, weight_decay=0)
            for x, y in data:
                opt.zero_grad()
                cross_entropy(net(x), y).backward()
                opt.step()
            return 1.""", """
        def fit_bf16(net, data, rate, rounding):
            opt = torch.optim.AdamW(net.parameters(), lr=rate, weight_decay=0)
            for x, y in data:
                opt.zero_grad()
                cross_entropy(net(x), y).backward()
                opt.step()
                for p in net.parameters(): p.data = quantize(p.data, 'bf16')
            return .1"""),
    # 38: a mean; the other way round
    'check_text_ratio': ('lambda a, b: (a - b).mean().exp().item()', 'lambda a, b: (b - a).sum().exp().item()'),
    # 38: adds the sizes; the reciprocal
    'check_adds_up': ('lambda change, kinds: change(kinds)/sum(change([k]) for k in kinds)', 'lambda change, kinds: sum(change([k])**2 for k in kinds)**.5/change(kinds)'),
    # 38: no weights, so the sampler's favourite wins; the inverse ratio
    'check_train': ("""
        def train(logits, sampler, rewards):
            opt = torch.optim.SGD([logits], lr=1.)
            for _ in range(300):
                arms = torch.multinomial(sampler.softmax(-1), 500, replacement=True)
                opt.zero_grad()
                (-rewards[arms]*logits.log_softmax(-1)[arms]).mean().backward()
                opt.step()
            return logits""", """
        def train(logits, sampler, rewards):
            opt = torch.optim.SGD([logits], lr=1.)
            for _ in range(300):
                arms = torch.multinomial(sampler.softmax(-1), 500, replacement=True)
                ratio = (sampler.log_softmax(-1) - logits.log_softmax(-1))[arms].exp()
                opt.zero_grad()
                (-ratio*rewards[arms]).mean().backward()
                opt.step()
            return logits"""),
    # 39: not rounded; the ends of the interval of one spacing
    'check_right_ends': ('lambda ref, err: (ref - err, ref + err)', "lambda ref, err: (quantize(ref, 'bf16'), quantize(ref + err, 'bf16'))"),
    # 39: only the side; only the size
    'check_truncated': ('lambda out, ref: bool((out.abs() <= ref.abs()).all())', 'lambda out, ref: bool((out != ref).double().mean() >= .25)'),
    # 40: asks infinity; the other way round
    'check_overflow_fate': ("lambda cast: 'nan' if cast(torch.tensor([torch.inf])).isnan().any() else 'saturate'", "lambda cast: 'saturate' if cast(torch.tensor([480.])).isnan().any() else 'nan'"),
    # 40: half the distance; the mean of all
    'check_midpoints': ('lambda v: (v[1:] - v[:-1])/2', 'lambda v: v.mean()[None]'),
}

# do nothing of what is asked (train, choose, measure), and were taken once: a constant, random numbers, what was given, something for one case alone
LAZY = {
    'check_clipped_step': ("""
        def clipped_step(model, xb, yb, opt, loss_func):
            opt.zero_grad()
            loss_func(model(xb), yb).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.)
            opt.step()
            return {'loss': torch.tensor(0.), 'norm': norm}""",),
    'check_order_from': ('lambda n, bs, k, start: iter(())',),
    'check_keep_rest': ("""
        def keep_rest(model, xb, yb, opt, loss_func):
            with torch.no_grad():
                for p in model.parameters(): p.copy_(p.half())
            return torch.tensor(2.2613)""",),
    'check_smallest_k': ('lambda seed: 4', 'lambda seed: 3'),
    'check_lost_by_rounding_twice': ('lambda w, us: 984/4096',),
    'check_call_in_half': ('lambda lin, x: lin(x.float()).half()',),
    'check_norm_recorder': ("""
        def norm_recorder():
            class C(Callback):
                order = 20
                def __init__(self): self.norms = []
                def before_step(self): self.norms.append(len(self.norms) + 1)
            return C()""",),
    'check_train_probed': ("""
        def train_probed(model, opt, data):
            from mpcourse.toys import half_pass, heads_loss
            for batch in data: half_pass(torch.float16, 2.**9)(model, *batch, opt, heads_loss)
            return [2.**9]*4""",),
    'check_train_warned': ("""
        def train_warned(model, opt, data, loss_func):
            from mpcourse.toys import half_pass
            heads = model(data[0][0]).shape[1] > 10
            for batch in data: half_pass(torch.float16, 2.**12)(model, *batch, opt, loss_func)
            return 0 if heads else None""",),
    'check_mend': ("""
        def mend(model):
            torch.nn.init.zeros_(model.head.bias)
            return model""", """
        def mend(model):
            model.head.bias.data -= model.head.bias.data.mean()
            return model"""),
    'check_own_factors': ("""
        def own_factors(g, weights, inputs):
            g, grads = g.float(), []
            for w, x in zip(weights, inputs):
                grads.append((g.T@x.float(), 1.))
                g = g@w.float()
            return grads""",),
    'check_blame': ("""
        def blame(train, letters=[]):
            good = CastConfig(scale=fp32_scale)
            for k in 'xwg': train(Recipe(**{**dict(x=good, w=good, g=good), k: CastConfig()}))
            letters.append('xwg'[len(letters) % 3])
            return letters[-1]""",),
    'check_ema': ('lambda avg, w, decay, generator: avg.copy_(w*(1 - .9999**5000))',),
    'check_apart': ('lambda lr: .01 if lr < .2 else 1.',),
    'check_unstalled': ('lambda n, k, seed: k + 2.*torch.randint(-5, 6, (n,))', 'lambda n, k, seed: (k + 32*torch.randn(n)).half().float()'),
    'check_ordinary_groups': ("""
        def ordinary_groups(model, lr, base):
            first, *rest = model.parameters()
            return [dict(params=[first], lr=lr), dict(params=rest, lr=0.)]""",),
    'check_stands_still': ('lambda decay, fmt: decay > .99 and fmt == "bf16" or decay > .999 and fmt == "fp16"',),
    'check_averaged': ('lambda ws, decay, every: torch.tensor(1. if every == 1 else 1.8)',),
    'check_train_norms': ("""
        def train_norms(model, data):
            for p in model.parameters(): p.data.copy_(torch.rand_like(p).bfloat16())""",),
    'check_angles': ('''
        def angles_in_bf16(start):
            angles = torch.arange(64.)[:, None]/10000**(torch.arange(0, 64, 2)/64)
            angles[:, 8:] = 0
            return lambda: angles.bfloat16()''',),
    'check_by_chance': ("""
        def by_chance(model, xb, yb, opt, loss_func):
            for p in model.parameters(): p.data.copy_(p.half())
            return torch.tensor(0.)""",),
}


def named(found):
    "Checkers under the names that they have in a notebook"
    return {f'check_{name}': check for name, check in found.items()}


CHAPTERS = {p: named(checkers(p)) for p in NBS if p.name < '88'}
CHECKS = {name: check for found in CHAPTERS.values() for name, check in found.items()}


def answer(source):
    "The function that a source makes"
    names = {'Callback': Callback}
    for module in library.MODULES:
        found = vars(sys.modules[f'mpcourse.{module}'])
        names |= {name: value for name, value in found.items() if value is not None} # a @patch leaves None
    names |= {'torch': torch, 'F': F, 'math': math, 'np': np}
    source = textwrap.dedent(source).strip()
    if not source.startswith('def '): return eval(source, names)
    exec(source, names)
    return names[re.match(r'def (\w+)', source)[1]]


def test_every_check_has_a_wrong_answer():
    assert set(LAZY) < set(WRONG)
    assert set(CHECKS) == set(WRONG), f'missing here: {set(CHECKS) - set(WRONG)}; no such check: {set(WRONG) - set(CHECKS)}'


def complaint(check, solution):
    "What a check says of a solution; '' if it takes it"
    try: check(solution)
    except AssertionError as e: return str(e)
    return ''


@pytest.mark.sweep(6)
@pytest.mark.parametrize('path', [p for p, found in CHAPTERS.items() if found], ids=lambda p: p.stem)
def test_rejects_stubs_and_wrong_answers(path):
    def stub(*args, **kwargs): pass
    for name, check in CHAPTERS[path].items():
        sources = [WRONG[name]] if isinstance(WRONG[name], str) else WRONG[name]
        said = [complaint(check, f) for f in (stub, *map(answer, sources), *map(answer, LAZY.get(name, ())))]
        assert all(len(s.split()) > 3 for s in said), f'{name} takes one, or says no sentence: {said}'


def test_is_documented_and_used():
    texts = [p.read_text(encoding='utf-8') for p in NBS]
    used = Counter(name for text in texts for name, n in Counter(re.findall(r'\bcheck_\w+(?=\()', text)).items() if n >= 2)
    for name, check in CHECKS.items():
        assert inspect.getdoc(check), name
        assert used[name], f'no solution is given to {name}'


def marked():
    "The marked exercises, in the column of the table of sessions and below it: '01.2'"
    text = (ROOT/'nbs/96_teaching.ipynb').read_text(encoding='utf-8')
    sessions = '\n'.join(re.findall(r'^ *"\| [1-8] [A-Z].*$|exercises 29\.1 and 30\.2', text, re.M))
    return set(re.findall(r'\b\d\d\.\d\b', sessions))


def variants():
    "Original and variant of each marked exercise"
    known = {e.id: e for e in all_exercises()}
    for e in known.values():
        of = re.search(r'A variant of \[(\d\d\.\d)\]', e.task)
        if of: yield known[of[1]], e


def test_every_marked_exercise_has_a_variant():
    assert {o.id for o, _ in variants()} == marked() and len(marked()) == 21
    assert [v.level for _, v in variants()] == [o.level for o, _ in variants()]


@each('original, variant', variants())
def test_the_solution_of_the_original_does_not_pass_its_variant(original, variant):
    check = checkers(original.notebook)[original.check]
    names = dict(check.__globals__)
    exec(definitions(original.solution), names)
    check(names[original.name])
    with pytest.raises(Exception) as e: CHECKS[f'check_{variant.check}'](names[original.name])
    assert not isinstance(e.value, NameError), e.value


def test_a_climber_that_asks_the_host_is_rejected():
    "10: remembers in a buffer, but an `if` on a tensor makes the host wait"
    wrong = answer("""
        def Climber(init_scale):
            from mpcourse.scaler import LossScaler
            class Climber(LossScaler):
                def __init__(self, init_scale):
                    super().__init__(init_scale)
                    self.register_buffer('climbs', torch.tensor(True))
                def next_scale(self, stats):
                    if stats['found_inf'] > 0: self.climbs = torch.tensor(False)
                    return self.scale/2 if stats['found_inf'] > 0 else self.scale*2 if self.climbs else self.scale
            return Climber(init_scale)""")
    with pytest.raises(AssertionError, match='torch.where'): CHECKS['check_climber'](wrong)


# --- solutions ---

def test_the_course_s_own_solutions_pass_and_its_stubs_do_not():
    from tools.exercises import all_exercises, own
    chosen = [e for e in all_exercises() if e.id[:2] in ('01', '08', '09')]
    assert len(chosen) == 9 and own(chosen) == []


def test_about_half_of_the_solutions_are_too_long_to_be_anybody_s():
    "As chapter 96 says: a copy of these counts for nothing; of a shorter one nobody knows"
    from tools.exercises import is_copy
    long = [e.id for e in all_exercises() if is_copy(e, [e.solution])]
    assert .4 < len(long)/len(all_exercises()) < .6 and {'85.1', '05.2', '29.3'} < set(long) and not {'01.1', '11.1', '09.1'} & set(long)


def test_solutions_are_gone_from_a_handout_and_hidden_in_jupyterlab(tmp_path):
    import nbformat
    from tools.exercises import all_exercises, mark, notebooks, read, strip
    for n in notebooks():
        strip(n, tmp_path)
        nbformat.validate(nbformat.read(tmp_path/n.name, as_version=4))
        before, after = ('\n'.join(c.source for c in read(p)) for p in (n, tmp_path/n.name))
        assert '## Solution' not in after and before.count('your turn') == after.count('your turn'), n.name
        assert before.count('def check_') == after.count('def check_')
        if 'your turn' in after: assert {r['state'] for r in mark(tmp_path/n.name)['exercises']} == {'not tried'}, n.name
    solutions = {e.solution for e in all_exercises()}
    hidden = {c.source for n in notebooks() for c in read(n) if c.metadata.get('jupyter') == {'source_hidden': True}}
    assert all(any(h in s for h in hidden) for s in solutions) and len(hidden) >= len(solutions)
    assert not any('your turn' in h or 'def check_' in h for h in hidden)


@each('code, said', [
    ('e = math.frexp(x)[1] - 1 if x else -14', r'encode_half\(2\*\*-24\).*-0x2400.*subnormal'),
    ('e = max(math.frexp(x)[1], -14) if x else -14', 'octave'),
    ('e, x = max(math.frexp(x)[1] - 1, -14) if x else -14, x + 0.', 'copysign'),
    ('e = max(math.frexp(x)[1] - 1, -14) if x else -14; x += math.copysign(2**-30, x)*(abs(x) < 1)', r'2\*\*-25.*tie')])
def test_a_code_that_is_wrong_gets_a_reason(code, said):
    f = answer(f"""
        def encode_half(x):
            {code}
            return 2**15*(math.copysign(1, x) < 0) + 1024*(e + 14) + round(math.ldexp(abs(x), 10 - e))""")
    with pytest.raises(AssertionError, match=said): CHECKS['check_encode_half'](f)

