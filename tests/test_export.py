"Docstrings out of the comments: what help() and an editor show"
import inspect

import pytest

import mpcourse


@pytest.mark.parametrize('name', sorted(set(mpcourse.__all__) - {'RECIPES'}))
def test_help_names_every_parameter(name):
    public = getattr(mpcourse, name)
    if isinstance(public, type) and issubclass(public, mpcourse.LossScaler): public = public if '__init__' in vars(public) else mpcourse.LossScaler
    init = getattr(public, '__init__', public) if isinstance(public, type) else public
    if not init.__module__.startswith('mpcourse'): return      # fastai's
    own = [p for p in inspect.signature(public).parameters.values() if p.name[0] != '_' and p.name not in ('args', 'kwargs', 'config', 'n_acc')]
    doc = inspect.getdoc(public)
    assert not [p.name for p in own if f'\n    {p.name}: ' not in doc and f'\n    *{p.name}: ' not in doc and f'\n    **{p.name}: ' not in doc], doc
