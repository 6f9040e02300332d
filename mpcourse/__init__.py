"""Mixed-precision training: the library that the notebooks of the course build.

`mpcourse.__all__` lists the public names. Each is imported when it is first touched, so that `import mpcourse` costs
nothing. The callbacks need fastai, and are listed where it is installed. Everything else lives in the modules.
"""
__version__ = "0.1.0"

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what editors and type checkers see; the aliases mark the names as public
    from .accumulate import NoMasterWeights as NoMasterWeights
    from .accumulate import running_mean as running_mean
    from .advise import advise_schemes as advise_schemes
    from .als import ALSScaler as ALSScaler
    from .callback import HalfPrecisionCB as HalfPrecisionCB
    from .callback import MixedPrecisionCB as MixedPrecisionCB
    from .checkpoint import CheckpointCB as CheckpointCB
    from .checkpoint import load_training_state as load_training_state
    from .checkpoint import save_training_state as save_training_state
    from .compare import compare_schemes as compare_schemes
    from .dynamic import DynamicScaler as DynamicScaler
    from .emulate import emulate_format as emulate_format
    from .emulate import exact_loss as exact_loss
    from .formats import FloatFormat as FloatFormat
    from .formats import get_format as get_format
    from .fp8 import RECIPES as RECIPES
    from .fp8 import Recipe as Recipe
    from .fp8 import fp8_linear as fp8_linear
    from .fp8 import simulate_fp8 as simulate_fp8
    from .gradscaler import GradScaler as GradScaler
    from .half import model_bytes as model_bytes
    from .half import model_to_float as model_to_float
    from .half import model_to_half as model_to_half
    from .half import saved_bytes as saved_bytes
    from .layerwise import LayerwiseScaler as LayerwiseScaler
    from .learner import ALSViewCB as ALSViewCB
    from .learner import MonitorCB as MonitorCB
    from .learner import RunningMeanCB as RunningMeanCB
    from .learner import WarnCB as WarnCB
    from .master import get_master as get_master
    from .master import to_master_grads as to_master_grads
    from .master import to_model_params as to_model_params
    from .monitor import TensorCollector as TensorCollector
    from .monitor import tensor_stats as tensor_stats
    from .policies import DeepSpeedScaler as DeepSpeedScaler
    from .policies import FairseqScaler as FairseqScaler
    from .policies import LogMaxScaler as LogMaxScaler
    from .policies import MetaseqScaler as MetaseqScaler
    from .policies import get_policy as get_policy
    from .rounding import quantize as quantize
    from .sanitizer import probe_precision as probe_precision
    from .sanitizer import sanitize as sanitize
    from .scaler import LossScaler as LossScaler
    from .scaler import StaticScaler as StaticScaler
    from .simulator import record_trace as record_trace
    from .simulator import replay as replay
    from .step import MixedStep as MixedStep
    from .step import StepOutcome as StepOutcome
    from .tensorcore import as_gpu as as_gpu
    from .tensorcore import fp32_accumulate as fp32_accumulate
    from .testing import assert_rounded as assert_rounded
    from .underflow import early_warning as early_warning
    from .underflow import note_flushed as note_flushed
    from .underflow import probe_flushed as probe_flushed
    from .unit import assert_unit_scaled as assert_unit_scaled
    from .unit_models import unit_param_groups as unit_param_groups
    from .unit_models import unit_scale as unit_scale

_NAMES = {
    'accumulate': ['NoMasterWeights', 'running_mean'],
    'advise': ['advise_schemes'],
    'als': ['ALSScaler'],
    'callback': ['HalfPrecisionCB', 'MixedPrecisionCB'],
    'checkpoint': ['CheckpointCB', 'load_training_state', 'save_training_state'],
    'compare': ['compare_schemes'],
    'dynamic': ['DynamicScaler'],
    'emulate': ['emulate_format', 'exact_loss'],
    'formats': ['FloatFormat', 'get_format'],
    'fp8': ['RECIPES', 'Recipe', 'fp8_linear', 'simulate_fp8'],
    'gradscaler': ['GradScaler'],
    'half': ['model_bytes', 'model_to_float', 'model_to_half', 'saved_bytes'],
    'layerwise': ['LayerwiseScaler'],
    'learner': ['ALSViewCB', 'MonitorCB', 'RunningMeanCB', 'WarnCB'],
    'master': ['get_master', 'to_master_grads', 'to_model_params'],
    'monitor': ['TensorCollector', 'tensor_stats'],
    'policies': ['DeepSpeedScaler', 'FairseqScaler', 'LogMaxScaler', 'MetaseqScaler', 'get_policy'],
    'rounding': ['quantize'],
    'sanitizer': ['probe_precision', 'sanitize'],
    'scaler': ['LossScaler', 'StaticScaler'],
    'simulator': ['record_trace', 'replay'],
    'step': ['MixedStep', 'StepOutcome'],
    'tensorcore': ['as_gpu', 'fp32_accumulate'],
    'testing': ['assert_rounded'],
    'underflow': ['early_warning', 'note_flushed', 'probe_flushed'],
    'unit': ['assert_unit_scaled'],
    'unit_models': ['unit_param_groups', 'unit_scale'],
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

_OF_FASTAI = set()  # modules that cannot be imported here
try:
    if find_spec('fastai') is None: _OF_FASTAI = {'callback', 'learner'}
except ImportError: _OF_FASTAI = {'callback', 'learner'}

__all__ = [name for name, module in _MODULE_OF.items() if module not in _OF_FASTAI]


if not TYPE_CHECKING:  # otherwise a checker would take any name for one of ours
    def __getattr__(name):
        if name not in _MODULE_OF:
            raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
        if _MODULE_OF[name] in _OF_FASTAI:
            raise ImportError(f"{name} is a callback of fastai, which is missing: pip install 'mpcourse[fastai]'")
        public = getattr(import_module(f'.{_MODULE_OF[name]}', __name__), name)
        for key, doc in import_module('._docs', __name__).DOCS.items():
            owner, _, method = key.partition('.')
            if owner != name: continue
            shown = vars(public).get(method) if method else public
            shown = getattr(shown, '__func__', getattr(shown, 'f', shown))  # of a class method, fastcore's too
            if shown is not None: shown.__doc__ = doc
        globals()[name] = public
        return public


def __dir__():
    return sorted([*globals(), *__all__])
