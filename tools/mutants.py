"""Breakages of one line of the library, each of which must turn a test red.

    python tools/mutants.py             all of them, with two workers; names the survivors,
                                        exit code 1 if there are any
    python tools/mutants.py step 31     those of a module, and number 31
    python tools/mutants.py --list

Each is applied to an exported file in a copy of the tree, never in place. A text that does not
occur exactly once is an error, so bring the mutants of a module along when you rewrite it. Add one
for each new line that matters."""
import importlib, importlib.util, multiprocessing, os, shutil, sys, tempfile, time
from collections import namedtuple
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROMISES = {1: '1_no_nan', 2: '2_fp32', 3: '3_resume', 4: '4_ranks', 5: '5_gradscaler',
            6: '6_conversions', 7: '7_arguments'}
OTHERS = ('fastai.basics', 'fastai.callback.schedule', 'fastai.callback.fp16',
          'fastai.callback.tracker', 'pandas', 'pytest', 'sklearn.datasets', 'matplotlib.pyplot',
          'torch._dynamo', 'torch.distributed', 'ipywidgets', 'scipy.special', 'hypothesis',
          'pytest_timeout', 'pytest_rerunfailures', 'pydoc_data.topics',
          'unittest.mock')          # imported once, before all tests
LIMIT = 900                         # seconds; a test that hangs is told as an error
WORDS = {0: 'SURVIVED', 1: 'killed', 5: 'NO-TEST'} # by pytest's exit code; else 'ERROR'
FORK = multiprocessing.get_context('fork')
PYTEST = ['-x', '-q', '-p', 'no:cacheprovider', '-p', 'no:warnings', '-o', 'addopts=', '--tb=line']

# promise: its number, or a chapter whose tests are meant; tests: what to select, for pytest's -k
Mutant = namedtuple('Mutant', 'module old new promise tests')
M = [Mutant(*row) for row in (
    # the second protocol
    ('scaler', 'return tree_map(lambda l: l.float()*self.scale, loss)', 'return tree_map(lambda l: l*self.scale, loss)', 'scaler', 'half_loss'),
    ('scaler', 'wide = self.scale if self.scale.is_mps else self.scale.double()', 'wide = self.scale.half()', 'scaler', 'inverse'),
    ('scaler', "torch.where(new - new == 0, new, before['scale'])", 'new', 'scaler', 'finite'),
    ('scaler', '.clamp(self.min_scale, self.max_scale)', '', 'scaler', 'finite or one_fp32'),
    ('scaler', 'before = {n: b.clone() for n, b in ours.items()}', 'before = dict(ours)', 'scaler', 'hold_keeps'),
    ('scaler', 'if self.skip_nonfinite_loss: after[n]', 'if False: after[n]', 'scaler', 'hold_keeps'),
    ('scaler', 'if self.skip_nonfinite_loss: after[n]', 'if True: after[n]', 'scaler', 'without_hold'),
    ('scaler', 'self.held.add_(1)', 'self.held', 'scaler', 'hold_keeps'),
    ('scaler', 'm._buffers[n] = b.to(fn(b).device)', 'm._buffers[n] = fn(b)', 'scaler', 'keeps_its_dtypes'),
    ('scaler', 'if state or not prefix: _check_state(self, state)', 'pass', 'scaler', 'refused_and_nothing'),
    ('scaler', 'not config[\'min_scale\'] <= state[\'scale\'] <= config[\'max_scale\']', 'False', 'scaler', 'refused_and_nothing'),
    ('scaler', "if wrong: raise ValueError(\n        f'These", "if False: raise ValueError(\n        f'These", 'scaler', 'refused_and_nothing'),
    ('scaler', "if wrong:\n            raise ValueError(f'{type", "if False:\n            raise ValueError(f'{type", 'scaler', 'nobody_has'),
    ('scaler', '        self._settings = tuple(state[\'config\'])\n', '        return\n', 'scaler', 'travel'),
    ('scaler', 'buffers = {n: b.clone() for n, b in model.named_buffers()}', 'buffers = {}', 'scaler', 'measuring'),
    ('scaler', 'scale = 2.**floor(log2(target/amax))', 'scale = 2.**(floor(log2(target/amax)) + 1)', 'scaler', 'measured_scale_puts'),
    ('scaler', 'torch.stack(largest).amax().item()', 'max(largest).item()', 'scaler', 'not_the_first'),
    ('scaler', 'row.amax() if is_maximum(n) else row.sum()', 'row.sum()', 'scaler', 'summed_over'),
    ('scaler', 'names = sorted(stats, key=str)', 'names = list(stats)', 'scaler', 'summed_over'),
    ('step', 'torch._amp_foreach_non_finite_check_and_unscale_(masters, here, inv)\n        if', 'torch._foreach_mul_(masters, inv)\n        if', 'step', 'one_bad_number'),
    ('step', 'if scaler.min_scale < 1:', 'if False:', 'step', 'below_one'),
    ('step', 'if new: torch._foreach_copy_', 'if False: torch._foreach_copy_', 'step', 'two_roundings'),
    ('step', 'if g.is_sparse: raise', 'if False: raise', 'step', 'sparse'),
    ('step', 'g.abs().ge_(want[1])', 'g.ge(want[1])', 'step', 'counted_on'),
    ('step', 'old.maximum(v) if is_maximum(n) else old + v', 'old + v', 'step', 'two_optimizers'),
    ('step', 'skips = skips.maximum(stats[\'loss_nonfinite\'])', 'pass', 'step', 'infinite_is_held'),
    ('step', "dist.is_initialized(): return dist.group.WORLD", 'dist.is_initialized(): return None', 'step', 'decide_as_one'),
    ('step', "return t.to_local() if hasattr(t, 'to_local') else t", 'return t', 'step', 'dtensor'),
    ('step', 'scaler.scale.clone()', 'scaler.scale', 'step', 'before_and_after'),
    ('step', 'torch.where(skip.to(now.device), was.to(now.device), now, out=now)', 'pass', 1, 'buffers'),
    ('step', 'if (m, n) in self.before or _is_lent(b): continue', 'pass', 1, 'micro_batch'),
    ('step', 'nn.utils.clip_grad_norm_(sum(group_params(opt), []), self.clip)', 'nn.utils.clip_grad_norm_(model.parameters(), self.clip)', 'step', 'clipping_counts'),
    ('callback', '        self.controller.buffers.save()', '        pass', 1, 'buffers'),
    ('step', 'if skip.item(): m._buffers[n] = was', 'pass', 'step', 'takes_back'),
    ('step', 'if x.is_complex() or not x.numel(): return False', 'return True', 'step', 'nor_log'),
    ('gradscaler', "config['min_scale'] = min(config['min_scale'], state['scale'])", 'pass', 'gradscaler', 'below_one'),
    ('tensorcore', 'for s in scales: _validate_scales(s, fmt)', 'pass', 'tensorcore', 'outside_the'),
    ('monitor', '(p - self.before[n]).norm()', 'p.norm()', 'monitor', 'update_ratio'),
    ('callback', 'if self.learn is not None: vars(self.learn).pop(method, None)', 'pass', 'callback', 'ctrl_c_a_callback'),
    ('callback', 'if alone and not named:  ', 'if False:  ', 'callback', 'cancelled_backward'),
    ('step', 'self.buffers.restore(found)', 'pass', 1, 'buffers'),
    ('tensorcore', 'with torch._C.DisableTorchFunctionSubclass():', 'if True:', 2, 'every_loss'),
    ('tensorcore', "if not self.fresh: top.masked_fill_(top == 0, -125 - self.low)", 'pass', 'tensorcore', 'group_of_zeros'),
    ('tensorcore', 'if self.low <= -126: top.clamp_(min=-126)', 'pass', 'tensorcore', 'below_fp32'),
    ('tensorcore', "unit.clamp_(max=torch.finfo(unit.dtype).max)", 'pass', 'tensorcore', 'left_fp32'),
    ('tensorcore', 'return torch.where(s.abs() >= 2.**128, s*torch.inf, out)', 'return out', 'tensorcore', 'left_fp32'),
    ('tensorcore', 'if first is None and second is not None: first = not second', 'pass', 'tensorcore', 'layer_forward'),
    ('tensorcore', "('H100', 'e4m3 e5m2', 'fp32', 32, 13, 13,", "('H100', 'e4m3 e5m2', 'fp32', 32, 14, 13,", 'tensorcore', 'real_gpus'),
    ('layerwise', 'kept.restore(torch.ones(()))', 'pass', 'layerwise', 'spectral'),
    ('step', 'self._stepped = not self.found_inf.item() > 0', 'self._stepped = True', 'step', 'leaves_every_bit'),
    ('step', '(outcome.found_inf > 0).float()', '(outcome.found_inf > 9).float()', 'step', 'leaves_every_bit'),
    ('step', 'if fused: del inner.grad_scale, inner.found_inf', 'pass', 'step', 'taken_back'),
    ('step', 'if held >= LOOK_EVERY:', 'if held >= 500:', 'step', 'fifty'),
    ('step', 'self.number % LOOK_EVERY != LOOK_EVERY - 1', 'True', 'step', 'fifty'),
    ('step', 'if self.next_scale.item() <= self.floor:', 'if False:', 'step', 'floor'),
    ('step', 'loss = loss_func(cast_floats(pred, torch.float32), yb)', 'loss = loss_func(pred, yb).float()', 'step', 'fp32_and_recorded'),
    ('step', '            self.controller.see_loss(loss)\n', '', 'step', 'infinite_is_held'),
    ('step', 'if self.controller and self.controller.watched: self.controller.watched.remove()', 'pass', 'step', 'serves_another'),
    # the factor and its inverse
    # the scaler's state
    # the reduction over ranks
    # the look and the unscaling, and their order
    # half weights and masters
    ('master', 'masters.append(_wide(p).clone())', 'masters.append(_wide(p.half()).clone())', 6, 'masters'),
    ('master', 'm.grad = None if g is None else _wide(g)*inv_scale', 'm.grad = None if g is None else _wide(g*inv_scale)', 6, 'masters'),
    ('master', 'for p, m in zip(ps, ms, strict=True): p.copy_(m.view_as(p))', 'pass', 6, 'masters'),
    # the cast policy, and norms in FP32
    ('half', 'policy[name] = torch.float32 if wide else dtype', 'policy[name] = dtype', 6, 'casts_all or norm'),
    ('half', 'wide = buffer or made_by_hook', 'wide = made_by_hook', 6, 'rotary'),
    ('half', 'return is_norm(m) or isinstance(m, (_Loss, ParametrizationList))', 'return isinstance(m, (_Loss, ParametrizationList))', 6, 'casts_all or norm'),
    ('half', 'if keeps_fp32(m): m.forward = FP32Forward(m, dtype)', 'if keeps_fp32(m): pass', 6, 'norm_computes'),
    ('half', 'return out if isinstance(self.module, _Loss) else cast(out, self.dtype)', 'return out', 6, 'norm_computes'),
    ('half', 'with torch.autocast(device, self.dtype): out', 'with torch.autocast(device, self.dtype, False): out', 6, 'buffer_meets'),
    ('half', 'setattr(m, name, False)', 'pass', 6, 'padding_mask'),
    ('half', "    _remove_casts(model)\n    _set_dtypes(model, policy)\n    return model\n\n", "    _set_dtypes(model, policy)\n    return model\n\n", 6, 'back_to_fp32'),
    ('half', "if found in HALVES: return found", "return found", 7, 'half_is'),
    # the callback: restored whatever happens
    ('callback', 'self.learn.loss_grad = self.scaler.scale_loss(loss)', 'pass', 1, 'trains_as'),
    ('callback', 'if not may_step: raise CancelStepException', 'pass', 1, 'every_bit and callback'),
    ('callback', 'self.open.enter_context(guarded_step(opt, self.last_outcome))', 'True', 1, 'every_bit and callback'),
    ('callback', '        with ExitStack() as self.open, ExitStack() as self.casting:', '        self.open, self.casting = ExitStack(), ExitStack()\n        if True:', 'callback', 'restored_after_every_exit'),
    ('callback', 'learn.opt.zero_grad() # the scale', 'pass # the scale', 2, 'exception_the_model'),
    ('callback', 'self.scaler.load_state_dict(state)', 'pass', 2, 'lr_find'),
    ('step', 'if dtype == torch.bfloat16 and not isinstance(scaler, StaticScaler | None):', 'if False:', 7, 'scheme'),
    ('callback', 'if self.controller.watched: self.controller.watched.remove()', 'pass', 'callback', 'watches'),
    ('callback', 'self.controller.see_loss(loss)', 'pass', 'callback', 'loss_that_is_nan'),
    ('callback', 'opened.gen.close()', 'pass', 'callback', 'bytecode'),
    ('callback', 'torch.set_grad_enabled(self.recording)', 'pass', 'callback', 'amid_no_grads'),
    ('callback', 'self.casting.close()', 'pass', 'callback', 'product_in_the_loss'),
    ('callback', 'return self.remove_cb(HalfPrecisionCB).remove_cb', 'return self.remove_cb', 2, 'to_fp32'),
    ('callback', '.as_subclass(Tensor)', '', 'callback', 'plain_tensors'),
    # what is written and restored
    ('checkpoint', "torch.set_rng_state(states['torch'])", 'pass', 3, 'draws'),
    ('checkpoint', "random.setstate(states['python'])", 'pass', 3, 'draws'),
    ('checkpoint', "np.random.set_state(states['numpy'])", 'pass', 3, 'killed_there'),
    ('checkpoint', "with open_locked(new) as f:", "with open_locked(path) as f:", 3, 'write_that_fails'),
    ('checkpoint', 'new.unlink(missing_ok=True)', 'pass', 3, 'write_that_fails'),
    ('checkpoint', "    raise TypeError(f'{name} is", "    return x\n    raise TypeError(f'{name} is", 3, 'cannot_be_read'),
    ('checkpoint', "x = x.as_subclass(Tensor)", "pass", 'checkpoint', 'every_loss'),
    ('checkpoint', "return {_KIND: 'tensors', 'of': torch.stack(x)}", "return x", 'checkpoint', 'late_as_early'),
    ('checkpoint', 'if free and path.exists() and os.path.samefile(f.fileno(), path)', 'if free', 'checkpoint', 'just_renamed'),
    ('checkpoint', 'try: fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)', 'try: pass', 'checkpoint', 'second_process or never_write'),
    ('checkpoint', 'f.truncate(0)', 'pass', 'checkpoint', 'written_over'),
    ('checkpoint', "if not self.saved['done']: return", "return", 'checkpoint', 'ctrl_c_in'),
    ('checkpoint', "        set_random_states(self.saved['order'], *_own(learn))\n", '', 3, 'killed_there'),
    ('checkpoint', '        fit_file(path, n + 1).unlink(missing_ok=True) # of an earlier life\n', '', 'checkpoint', 'void'),
    ('checkpoint', '_fits[self.place] += 1', 'pass', 'checkpoint', 'one_for_all'),
    ('checkpoint', "if isinstance(new, (list, dict, set)) and hasattr(old, 'clear'):", 'if False:', 'checkpoint', 'containers'),
    ('checkpoint', "and not isinstance(x, nn.Parameter):\n", ":\n", 'checkpoint', 'parameters_stay'),
    ('checkpoint', 'if bad or doc', 'if doc', 3, 'does_not_fit'),
    ('checkpoint', "map_location=device, weights_only=True)", "map_location=device, weights_only=False)", 3, 'does_not_fit'),
    ('checkpoint', "        _load_optimizer(opt, doc['opt']) #", '        pass #', 3, 'draws'),
    ('checkpoint', "for m, saved in zip(_masters(model, opt), doc['masters']): m.copy_(saved)", 'pass', 3, 'masters'),
    ('checkpoint', '        if i in saved[\'state\']: opt.state[p] = tree_map', '        if False: opt.state[p] = tree_map', 'checkpoint', 'keeps_its_dtype'),
    ('checkpoint', "if why: raise", 'if False: raise', 3, 'does_not_fit'),
    ('checkpoint', 'part.load_state_dict(before[name])', 'pass', 'checkpoint', 'refuses_its_state'),
    ('checkpoint', "if was != self.arguments:", 'if False:', 'checkpoint', 'other_arguments'),
    ('checkpoint', "if scaler is not None: parts['scaler'] = scaler", "pass", 3, 'each_policy'),
    ('checkpoint', "for rng, state in zip(more, states['more']): rng.setstate(state)", 'pass', 3, 'killed_there and fit'),
    ('checkpoint', "if self.saved: set_random_states(self.saved['order'], *_own(self.learn))", 'pass', 3, 'killed_there and fit'),
    ('checkpoint', "        doc['model'].update(decode(doc['model']))\n", '', 'checkpoint', 'beside_its_tensors'),
    ('checkpoint', "state['callback_state'].get(n, [])): set_callback_state(x, saved)", "state['callback_state'].get(n, [])): pass", 3, 'killed_there and fit'),
    ('checkpoint', "        set_fit_state(learn, load_training_state(", "        str(load_training_state(", 3, 'killed_there and fit'),
    ('checkpoint', "p.grad = torch.zeros_like(p) if n in grads else None", 'pass', 'checkpoint', 'long_ago'),
    ('checkpoint', "if common: os.replace(files[max(common)], file)", 'if common: pass', 'checkpoint', 'two_ranks'),
    ('checkpoint', "self.step_done = True", "pass", 'checkpoint', 'so_many_steps'),
    ('checkpoint', "objects += [cb.history for cb in learn.cbs if isinstance(cb, MixedPrecisionCB)]", "pass", 'checkpoint', 'bit_for_bit'),
    ('callback', 'self.controller.number = len(self.history) - 1', 'pass', 'checkpoint', 'bit_for_bit'),
    ('checkpoint', "        self.step_done = False\n", "        self.step_done = self.step_done\n", 'checkpoint', 'accumulate'),
    # growth and back-off
    ('dynamic', "bad = stats['found_inf'] != 0 ", "bad = stats['found_inf'] > 0 ", 'dynamic', 'patience'),
    ('dynamic', 'back = bad & (left <= 0)', 'back = bad & (left < 0)', 'dynamic', 'patience'),
    ('dynamic', 'if self.consecutive: clean =', 'if False: clean =', 'dynamic', 'patience'),
    ('dynamic', 'grow = ~bad & (clean == self.growth_interval)', 'grow = ~bad & (clean >= self.growth_interval)', 'dynamic', 'beyond or patience'),
    ('dynamic', "full = ~bad if self.refill == 'clean' else grow", 'full = grow', 'dynamic', 'two_kinds'),
    ('dynamic', 'clean.masked_fill(grow, 0)', 'clean', 'dynamic', 'patience'),
    ('dynamic', 'scale*self.backoff_factor, grown', 'scale/self.growth_factor, grown', 'dynamic', 'patience'),
    ('dynamic', 'self.scale if self.scale.is_mps else self.scale.double()', 'self.scale', 'dynamic', 'patience'),
    ('dynamic', "scaler.growth_tracker.fill_(state['_growth_tracker'])", 'pass', 'dynamic', 'torchs_checkpoint'),
    ('dynamic', 'for k in keys: getattr(scaler, k).fill_(state[k])', 'pass', 'dynamic', 'megatrons_checkpoint'),
    ('policies', 'grow = ~bad & (since > self.growth_interval)', 'grow = ~bad & (since >= self.growth_interval)', 'policies', 'golden_deepspeed'),
    ('policies', 'spent = self.patience <= 1', 'spent = self.patience <= 0', 'policies', 'golden_deepspeed'),
    ('policies', 'self.since = since.masked_fill(grow, 1)', 'self.since = since.masked_fill(grow, 0)', 'policies', 'its_rule'),
    ('policies', 'self.since_overflow.masked_fill(bad, 0) + 1', 'self.since_overflow + 1', 'policies', 'golden_fairseq'),
    ('policies', 'less = (self.window//2).clamp(min=1)', 'less = self.window', 'policies', 'ten_bad'),
    ('policies', 'down < self.min_scale if self.moving else', 'down <= self.min_scale if self.moving else', 'policies', 'golden_metaseq'),
    ('policies', 'amax.log2())', 'amax.log())', 'policies', 'its_formulas'),
    ('policies', 'x = torch.where(bad, self.overflow_as,', 'x = torch.where(bad, 16.,', 'policies', 'its_formulas'),
    ('policies', '        s.clean = 0\n        s.patience = hysteresis', '        s.clean = 0', 'policies', 'golden_megatron'),
    ('policies', 'fastai=dict(NO_FLOOR, init_scale=2.**24, growth_interval=500, consecutive=False)', 'fastai=dict(NO_FLOOR, init_scale=2.**24, growth_interval=500)', 'policies', 'golden_fastai'),
    ('als', 'return torch.where(bad | decide & large, self.scale/self.factor,', 'return torch.where(bad | decide & large, self.scale,', 5, 'as_stored and als'),
    ('als', 'torch.where(bad | decide & large', 'torch.where(decide & large', 'als', 'at_once'),
    ('als', "> self.threshold*stats['numel']", ">= self.threshold*stats['numel']", 'als', 'more_than'),
    ('als', 'new = torch.where(decide, up, self.scale)', 'new = up', 'als', 'exact_traces'),
    ('als', 'torch.where(loss == 0, self.scale, up)', 'up', 'als', 'zeros_double'),
    ('als', 'for edge in self.edges[1:]: up =', 'for edge in []: up =', 'als', 'deadband'),
    ('als', 'self.numel += g.numel()', 'self.numel += 1', 'als', 'numpys'),
    ('als', 'g.numel() - below.sum', 'below.sum', 'als', 'numpys'),
    ('als', 'if g.dtype != torch.float16 or not g.numel(): return', 'if not g.numel(): return', 'als', 'only_half'),
    ('als', 'for h in self.hooks: h.remove()', 'pass', 'als', 'hooks_go'),
    ('als', 'if self.scaler.saturate: return', 'if False: return', 'als', 'saturation_clips'),
    ('als', 'if not self.weights: return', 'if False: return', 'als', 'not_chosen'),
    ('layerwise', 'super().inv_scale()/carried[name]', 'super().inv_scale()', 'layerwise', 'come_out_again'),
    ('layerwise', 'if old != carried: changes[source][slot] = carried/old', 'pass', 'layerwise', 'come_out_again'),
    ('layerwise', 'return new, self.bounds[i]', 'return new, inf', 'layerwise', 'bound_of_a_layer'),
    ('layerwise', '.minimum(U_MAX/top)', '', 'layerwise', 'is_the_formula'),
    ('layerwise', 'if self.counting or new != carried:', 'if self.counting:', 'layerwise', 'come_out_again'),
    ('layerwise', "if ('numel', self.layers[0]) in stats:", 'if False:', 'layerwise', 'come_to_light'),
    ('layerwise', 'torch.where(bad & (used > 1), lower, self.ceiling)', 'self.ceiling', 'layerwise', 'until_it_is_gone'),
    ('monitor', 'if owner and owner.active: return', 'if owner: return', 'monitor', 'inactive_hooks'),
    ('monitor', 'self.passes.append({})', 'self.passes.append(self.rows)', 'monitor', 'was_dropped'),
    ('monitor', "if (n, 'weight_grad') in self.rows and p.grad is None: self.forget()", 'pass', 'monitor', 'was_dropped'),
    ('monitor', "if kind == 'weight_grad': self.factors[name] = inverse_scale(self.scaler, name)", 'pass', 'monitor', 'layerwise'),
    ('underflow', 'torch.random.fork_rng(devices), ', '', 'underflow', 'leaves_no_trace'),
    ('underflow', 'flushed = (zero & high[name, kind]).sum()', 'flushed = zero.sum()', 'underflow', 'structural'),
    ('underflow', 'late = table.iloc[-3:].mean()', 'late = table.mean()', 'underflow', 'last_three'),
    ('learner', 'self.learn.opt.zero_grad()                          # the old', 'pass  #', 'underflow', 'old_scalers_hooks'),
    ('learner', 'if self.controller.watched: self.controller.watched.remove()', 'pass', 'underflow', 'old_scalers_hooks'),
    ('accumulate', 'return mean*((k - 1)/k) + g/k', 'return mean + (g - mean)/k', 'accumulate', 'two_of_the_formulas'),
    ('accumulate', 'return mean.lerp(g, 1/k)', 'return mean + (g - mean)*(1/k)', 'accumulate', 'two_of_the_formulas'),
    ('accumulate', 'grads, n/self.seen)', 'grads, 1/len(self.means))', 'accumulate', 'unequal_parts'),
    ('learner', 'if self.mean.seen < self.n_acc: raise CancelBatchException', 'pass', 'accumulate', 'fastais_in_fp32'),
    ('accumulate', "rounding = 'stochastic' if self.rounding == 'stochastic' else 'nearest'", "rounding = 'nearest'", 'accumulate', 'small_updates'),
    ('accumulate', 'if self.compensation: w = w + self.compensation[i]', 'pass', 'accumulate', 'small_updates'),
    ('accumulate', "with self.wide(): opt.load_state_dict(state['opt'])", "opt.load_state_dict(state['opt'])", 'accumulate', 'resumed'),
    ('accumulate', "self.generator.set_state(state['generator'])", 'pass', 'accumulate', 'resumed'),
    # ranks
    ('ranks', 'running_mean(parts)', 'sum(parts)/len(parts)', 'ranks', 'no_mean_is_larger'),
    ('ranks', "'stochastic', 'inf'", "'nearest', 'inf'", 'ranks', 'stochastic_rounding'),
    ('step', '    return group\n\n# %% ../nbs/09_step.ipynb #c17', '    return None\n\n# %% ../nbs/09_step.ipynb #c17', 'ranks', 'a_group_decides'),
    # the drop-in
    ('gradscaler', "if state['taken']: return optimizer.step(*args, **kwargs)", 'optimizer.step(*args, **kwargs)', 1, 'every_bit and gradscaler'),
    ('gradscaler', 'self.policy.load_state_dict(from_torch(state, **config).state_dict())', 'pass', 'gradscaler', 'torchs_state'),
    ('gradscaler', "for s in states: controller.add(s['seen'])", "controller.add(states[0]['seen'])", 5, 'two_optimizers'),
    ('gradscaler', 'if self.policy.min_scale < 1:  ', 'if False:  ', 'gradscaler', 'overflows_while'),
    ('gradscaler', 'if self.policy.min_scale < 1 and ready', 'if False and ready', 'gradscaler', 'overflows_while'),
    ('gradscaler', 'self.controller.see_loss(outputs)', 'pass', 'gradscaler', 'is_held'),
    ('gradscaler', 'controller.count(grads)', 'pass', 'gradscaler', 'add_up'),
    ('gradscaler', 'skips.clamp(max=1)', 'skips*0', 4, 'gradscaler'),
    ('gradscaler', '= supports_found_inf(optimizer)', '= True', 'gradscaler', 'first_step_of_fused'),
    ('gradscaler', "for n in ('grad_scale', 'found_inf'): vars(optimizer).pop(n, None)", 'pass', 'gradscaler', 'nothing_behind'),
    ('step', 'if torch.is_grad_enabled() or module.training: self.save(module)', 'pass', 1, 'buffers and gradscaler'),
    ('gradscaler', "if 'policy' in state: self.policy.load_state_dict(state['policy'])", "if 'policy' in state: pass", 'gradscaler', 'restored'),
    ('gradscaler', 'seen = controller.gather()', 'seen = dict(controller.stats, skips=found)', 4, 'gradscaler'),
    # unit scaling
    ('unit', 'return dict(y=rsqrt(fan_in), x=rsqrt(fan_out), w=rsqrt(batch), b=rsqrt(batch))', 'return dict(y=rsqrt(fan_in), x=rsqrt(fan_out), w=rsqrt(batch)**.5, b=rsqrt(batch))', 6, 'unit'),
    ('unit', 'def backward(ctx, g): return g if ctx.bwd == 1 else g*ctx.bwd, None, None', 'def backward(ctx, g): return g, None, None', 6, 'unit'),
    ('unit', "return scaled(op(*args.values()), factors['y'], before)", "return scaled(op(*args.values()), factors['y'], 1.)", 6, 'unit'),
    ('unit_models', 'p.div_(std + (std == 0))', 'pass', 6, 'unit'),
    ('unit_models', "        if not (stays or cls): why[here] = f'no unit-scaled {type(m).__name__} is known'\n", '', 6, 'unit'),
    # eight bits, and rounding
    ('fp8', 'return amax/fmt.max', 'return amax/fmt.max*.75', 6, 'operands'),
    ('fp8', 'if self.training: self.history.copy_(later)', 'pass', 6, 'delayed'),
    ('fp8', "Float8CurrentScaling', 'e5m2'", "Float8CurrentScaling', 'e4m3'", 6, 'operands'),
    ('fp8', "if isinstance(m, _SEALED) and not stays:", "if False:", 6, 'names'),
    ('fp8', 'if not (forward and self.mode.recipe):', 'if True:', 6, 'names'),
    ('fp8', 'scale = scale.masked_fill(~amax.isfinite(), torch.nan)', 'pass', 'fp8', 'hidden'),
    ('fp8', 'at = a.mT if ctx.reuse else r.x(turn(a.mT))', 'at = r.x(a).mT', 'fp8', 'along'),
    ('fp8', 'exponent = exponent - (mantissa == .5).int()', 'exponent = exponent - 1', 'fp8', 'specifications'),
    ('fp8', 'if self.once and torch._C', 'if False and torch._C', 'fp8', 'checkpointing'),
    ('fp8', "_apply = LossScaler._apply", 'pass', 'fp8', 'stay_single'),
    ('fp8', 'own = None if stays else recipe', 'own = recipe', 'fp8', 'kept'),
    ('fp8', 'with mode.at(name, recipe): return forward', 'if True: return forward', 'fp8', 'kept'),
    ('fp8', 'finally: self.name, self.recipe = before', 'finally: pass', 'fp8', 'interrupt'),
    ('fourbits', "return quantize((amax/fmt.max/one).clamp(min=e4m3.tiny), e4m3)*one", "return quantize((amax/fmt.max/one).clamp(min=e4m3.tiny), e4m3)", 'fourbits', 'scale'),
    ('fourbits', "rounding='stochastic', tile=(1, 16)", "rounding='nearest', tile=(1, 16)", 'fourbits', 'recipe'),
    ('fourbits', 'return h/n**.5', 'return h/n', 'fourbits', 'rotated'),
    ('rounding', "if rounding == 'nearest': q = q.round_()", "if rounding == 'nearest': q = (q + .5).floor_()", 6, 'ties'),
    ('rounding', '.clamp(fmt.tiny, 2.**fmt.emax)', '.clamp(fmt.tiny/2, 2.**fmt.emax)', 6, 'ties'),
)]


def check_texts(mutants):
    "Those whose text is not there exactly once, each as a sentence"
    wrong = []
    for mutant in mutants:
        text = (ROOT/'mpcourse'/f'{mutant.module}.py').read_text()
        times = text.count(mutant.old)
        if times != 1: wrong.append(f'{mutant.module}: {times} times {mutant.old!r}')
    return wrong


def copy_tree(folder):
    "What tests need of the tree"
    without_caches = shutil.ignore_patterns('__pycache__')
    for name in ('mpcourse', 'tests', 'tools'):
        shutil.copytree(ROOT/name, folder/name, ignore=without_caches)
    shutil.copy(ROOT/'pyproject.toml', folder)


def test_file(promise):
    "The file with the tests of a promise, or with a chapter's own"
    if promise in PROMISES: return f'tests/promises/test_{PROMISES[promise]}.py'
    return f'tests/test_{promise}.py'


def run_pytest(folder, selected, out):
    "In a child: run tests of a copy of the tree"
    os.chdir(folder)
    sys.path[:0] = [str(folder), str(folder/'tests')]
    os.environ['PYTHONPATH'] = str(folder)
    with open(out, 'w') as f, redirect_stdout(f), redirect_stderr(f):
        import pytest
        code = pytest.main([*selected, *PYTEST])
    os._exit(code)    # without waiting for threads that a test has left


def outcome(folder, selected):
    """Pytest's exit code and last line

    The child has imported torch, fastai and pytest already, and nothing of ours.
    """
    out = folder/'out.txt'
    child = FORK.Process(target=run_pytest, args=(folder, selected, out))
    child.start()
    child.join(LIMIT)
    child.kill()      # if it still runs
    child.join()
    lines = out.read_text().strip().splitlines()
    failures = [line for line in lines if line.startswith(('FAILED', 'ERROR'))]
    return child.exitcode, (failures or lines or [''])[-1]


def try_one(folder, mutant):
    "Break, test, mend: a word and a line"
    file = folder/'mpcourse'/f'{mutant.module}.py'
    whole = file.read_text()
    try:
        file.write_text(whole.replace(mutant.old, mutant.new))
        code, line = outcome(folder, [test_file(mutant.promise), '-k', mutant.tests])
    finally: file.write_text(whole)
    return WORDS.get(code, 'ERROR'), line


def import_others():
    "Import what tests use, and nothing of ours, so that each child starts with it"
    ours = ROOT, ROOT/'tools'
    sys.path[:] = [path for path in sys.path if Path(path or '.').resolve() not in ours]
    for name in OTHERS:
        if importlib.util.find_spec(name.split('.')[0]): importlib.import_module(name)
    import torch
    assert 'mpcourse' not in sys.modules
    torch.set_num_threads(1)


def work(numbers, out):
    "What a worker does: a line into the pipe for each of its mutants"
    sys.dont_write_bytecode = True
    import_others()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        copy_tree(folder)
        for i in numbers:
            mutant = M[i]
            start = time.monotonic()
            word, line = try_one(folder, mutant)
            seconds = time.monotonic() - start
            what = f'{word:9} {i:3} {mutant.module:12} {mutant.old.strip()[:60]!r}'
            os.write(out, f'{what}  ({seconds:.0f} s) {line[:110]}\n'.encode())


def start_workers(chosen):
    "Two workers, each with every second mutant; the lines that they write, as they come"
    reader, writer = os.pipe()
    for k in range(2): FORK.Process(target=work, args=(chosen[k::2], writer)).start()
    os.close(writer)
    return open(reader, encoding='utf-8')


def main(args):
    "Try the mutants of these modules or with these numbers, by default all; the exit code"
    if args == ['--list']:
        for i, mutant in enumerate(M):
            change = f'{mutant.old.strip()!r} -> {mutant.new.strip()!r}'
            print(f'{i:3} {mutant.module:12} {change}  promise {mutant.promise}: {mutant.tests}')
        return 0
    chosen = [i for i, mutant in enumerate(M)
              if not args or mutant.module in args or str(i) in args]
    wrong = check_texts(M[i] for i in chosen)
    if wrong:
        print('These mutants replace a text that does not occur exactly once, '
              'so give them the present text:', *wrong, sep='\n  ')
        return 2
    killed = 0
    for line in start_workers(chosen):
        print(line, end='', flush=True)
        if line.startswith('killed'): killed += 1
    print(f'{killed} of {len(chosen)} breakages turned a test red.')
    return int(killed < len(chosen))


if __name__ == '__main__': sys.exit(main(sys.argv[1:]))
