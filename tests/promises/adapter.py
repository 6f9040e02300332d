"The one place where the promises touch the library: a rewrite changes this file and no test"
import importlib
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import torch

# name → the module that has it
PLACES = dict(StaticScaler='scaler', MixedStep='step', unscale_='step', get_policy='policies', ALSScaler='als', GradScaler='gradscaler',
              fp32_accumulate='tensorcore', emulate_format='emulate', named_gradients='step', take_step='step', get_master='master', to_model_params='master',
              to_master_grads='master', get_toy='toys', batches='toys', tensor_dls='callback', MixedPrecisionCB='callback',
              CheckpointCB='checkpoint', save_training_state='checkpoint', load_training_state='checkpoint',
              model_to_half='half', model_to_float='half', unit_scale='unit_models', simulate_fp8='fp8', quantize='rounding')


def _get(name): return getattr(importlib.import_module(f'mpcourse.{PLACES[name]}'), name)


def make_scaler(kind='dynamic', **kw):
    "A policy by its name: static, dynamic, als, megatron, torch, fastai, logmax …"
    if kind == 'als': return _get('ALSScaler')(**kw)
    return _get('get_policy')('dynamic', **dict(hysteresis=2) | kw) if kind == 'hysteresis' else _get('get_policy')(kind, **kw)


def next_scales(scaler, found, amax=None):
    "The scale after each step of a trace: whether anything was not finite, and the largest scaled magnitude"
    def told(want, bad, top):
        if want == 'amax': return torch.inf if bad else top
        if want == ('amax', 'loss'): return 1.
        if isinstance(want, tuple): return 1000.*(bad or top >= want[1])        # ('above', edge), of a million
        return dict(found_inf=float(bad), found_after=0., total=1e6, numel=1e6)[want]
    out = []
    for bad, top in zip(found, amax or [1.]*len(found)):
        stats = {w: torch.tensor(told(w, bad, top)) for w in scaler.required_stats}
        scaler.update(dict(found_inf=torch.tensor(float(bad)), loss_finite=torch.tensor(1.)) | stats)
        out.append(scaler.scale.item())
    return out


def make_step(scaler, clip=None, group=None, native=False, masters=None, dtype=torch.float16):
    "A step (model, xb, yb, opt, loss_func) -> dict of loss, scale and skipped; on lent halves, or on 'masters'"
    compute = nullcontext if native else _get('fp32_accumulate')
    if masters is None: return _get('MixedStep')(scaler, dtype, compute=compute, clip=clip, group=group)
    model_groups, master_groups, flat = masters
    def step(model, xb, yb, opt, loss_func):
        "As in chapter `master`: half model, FP32 masters, gradients up and unscaled, weights down"
        model.zero_grad(); opt.zero_grad()
        with compute(): loss = loss_func(model(xb.half() if xb.is_floating_point() else xb).float(), yb)
        with compute(): scaler.scale_loss(loss).backward()
        scale, finite = scale_of(scaler), all(p.grad.isfinite().all() for g in model_groups for p in g)
        if finite:
            _get('to_master_grads')(model_groups, master_groups, 1/scale, flat)
            opt.step()
            _get('to_model_params')(model_groups, master_groups, flat)
        return dict(loss=loss.detach(), scale=torch.tensor(scale), skipped=torch.tensor(not finite))
    return step


def train(step, model, batches, opt, loss_func, before=None):
    "Run a step over batches: a list of (loss, scale, skipped)"
    out = []
    for i,(xb, yb) in enumerate(batches):
        if before: before(i)
        r = step(model, xb, yb, opt, loss_func)
        out.append((float(r['loss']), float(r['scale']), bool(r['skipped'])))
    return out


def scale_of(x):
    "The present loss scale of a policy, a step, a GradScaler or a Learner"
    if hasattr(x, 'get_scale'): return x.get_scale()
    if hasattr(x, 'cbs'): x = next(cb for cb in x.cbs if isinstance(cb, _get('MixedPrecisionCB')))
    return getattr(x, 'scaler', x).scale.item()


def toy(name, seed=0, steps=20, bs=None):
    "A small problem: model, a list of batches, an optimizer for parameters, a loss"
    t = _get('get_toy')(name)
    model = t.model(seed=seed)
    return SimpleNamespace(model=model, opt=t.opt, loss_func=t.loss_func,
                           batches=list(_get('batches')(t.data(), bs or t.bs, steps, seed)))


def make_gradscaler(policy=None, skip_nonfinite_loss=None, group=None, **kw):
    "The drop-in; skip_nonfinite_loss=False: torch's decisions, step for step"
    return _get('GradScaler')(policy=policy, skip_nonfinite_loss=skip_nonfinite_loss, group=group, **kw)


def make_learner(model, train, valid, scaler=None, bs=8, mixed=True, dtype='fp16', emulated=False, **kw):
    "A Learner on tensors in mixed precision; mixed=False: in FP32; emulated: each result rounded to FP16"
    import fastai.callback.schedule  # noqa: F401  (fit_one_cycle, lr_find)
    from fastai.basics import Learner
    learn = Learner(_get('tensor_dls')(train, valid, bs), model, **kw)
    learn.remove_cbs([cb for cb in learn.cbs if cb.name == 'progress'])
    more = dict(compute=partial(_get('emulate_format'), 'fp16')) if emulated else {}
    return learn.to_mixed(scaler, dtype, **more) if mixed else learn


def checkpoint(path, every=2):
    "The callback that makes a fit resumable"
    return _get('CheckpointCB')(path, every=every)


def save(path, model, opt, scaler=None, **extra):
    "Write a training state"
    return _get('save_training_state')(path, model, opt, scaler, **extra)


def load(path, model, opt, scaler=None):
    "Read it back; what was given as **extra"
    return _get('load_training_state')(path, model, opt, scaler)


def convert(what, model, *args, **kw):
    "'half', 'float', 'unit', 'fp8': a model converted; 'masters': (model groups, master groups); 'quantize': a tensor"
    names = dict(half='model_to_half', float='model_to_float', unit='unit_scale', fp8='simulate_fp8',
                 masters='get_master', quantize='quantize')
    if what not in names: raise ValueError(f'There is no conversion {what!r}.')
    return _get(names[what])(model, *args, **kw)
