"Docstrings out of the comments: what help() and an editor show"
import inspect

import pytest

import mpcourse
from tools.export import document, documented

MODULE = '''
import torch

def public(
    x:float, # finite; in octaves
    # what stands above a line of its own
    y:int=2,
    *more:str, z=3, # names, and a \\\\ number
)->float: # never below 0
    "Adds (not really); ValueError for an x that is not finite; TypeError or ValueError else"
    return x

def short(x): # twice of it
    "Doubles"
    return 2*x

def not_public(
    x, # unseen
): "Stays"

class Thing:
    "Is one"
    def __init__(self,
        size, # how large
    ): self.size = size

    def grow(self,
        by=1, # how much
    ):
        """Grow

        In place."""

    def _hidden(self,
        x, # unseen
    ): "Stays"

@patch
def shrink(self:Thing,
    by:int, # how much less
):
    "Shrink"

@dataclass
class Row:
    "A row"
    name: str # of the row
    size: int = 3
'''


@pytest.fixture
def docs(): return documented(MODULE, {'public', 'short', 'Thing', 'Row'}, {'Thing'})


def test_a_function(docs):
    assert docs['public'] == r"""Adds (not really); ValueError for an x that is not finite; TypeError or ValueError else

Args:
    x: finite; in octaves
    y: what stands above a line of its own
    *more: names, and a \\ number
    z: names, and a \\ number

Returns:
    never below 0

Raises:
    ValueError: for an x that is not finite
    TypeError or ValueError: else"""
    assert docs['short'] == 'Doubles\n\nReturns:\n    twice of it'


def test_classes_methods_and_what_is_patched(docs):
    assert docs['Thing'] == 'Is one\n\nArgs:\n    size: how large' and docs['Row'] == 'A row\n\nArgs:\n    name: of the row'
    assert docs['Thing.grow'] == 'Grow\n\nIn place.\n\nArgs:\n    by: how much' and docs['Thing.shrink'] == 'Shrink\n\nArgs:\n    by: how much less'
    assert docs.keys() == {'public', 'short', 'Thing', 'Thing.grow', 'Thing.shrink', 'Row'}


def test_the_file_holds_what_is_public(tmp_path):
    "The modules stay as nbdev_export writes them"
    (tmp_path/'__init__.py').write_text("_NAMES = {\n    'some': ['public'],\n}\n")
    (tmp_path/'some.py').write_text(MODULE)
    document(tmp_path)
    assert (tmp_path/'some.py').read_text() == MODULE
    found = {}
    exec((tmp_path/'_docs.py').read_text(), found)
    assert found['DOCS'] == documented(MODULE, {'public'}, set())


@pytest.mark.parametrize('name', sorted(set(mpcourse.__all__) - {'RECIPES'}))
def test_help_names_every_parameter(name):
    public = getattr(mpcourse, name)
    if isinstance(public, type) and issubclass(public, mpcourse.LossScaler): public = public if '__init__' in vars(public) else mpcourse.LossScaler
    init = getattr(public, '__init__', public) if isinstance(public, type) else public
    if not init.__module__.startswith('mpcourse'): return      # fastai's
    own = [p for p in inspect.signature(public).parameters.values() if p.name[0] != '_' and p.name not in ('args', 'kwargs', 'config', 'n_acc')]
    doc = inspect.getdoc(public)
    assert not [p.name for p in own if f'\n    {p.name}: ' not in doc and f'\n    *{p.name}: ' not in doc and f'\n    **{p.name}: ' not in doc], doc
