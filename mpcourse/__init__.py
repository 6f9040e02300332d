"""Mixed-precision training: the library that the notebooks of the course build.

The public names stand below. Each is imported when it is first touched, so that `import mpcourse` costs nothing
and the names for fastai need fastai only where they are used. Everything else lives in the modules.
"""
__version__ = "0.1.0"

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what editors and type checkers see
    from .accumulate import HalfStorage, running_mean
    from .als import ALSScaler
    from .callback import HalfPrecisionCB, MixedPrecisionCB
    from .checkpoint import CheckpointCB, load_training_state, save_training_state
    from .dynamic import DynamicScaler
    from .formats import FloatFormat, get_format
    from .fp8 import Recipe, fp8_linear, simulate_fp8
    from .gradscaler import GradScaler
    from .half import model_bytes, model_to_float, model_to_half, saved_bytes
    from .layerwise import LayerwiseScaler
    from .learner import ALSViewCB, MonitorCB, RunningMeanCB, WarnCB
    from .master import get_master, to_master_grads, to_model_params
    from .monitor import TensorCollector, tensor_stats
    from .overflow import OverflowWatch, early_warning, find_overflow
    from .policies import DeepSpeedScaler, FairseqScaler, LogMaxScaler, MetaseqScaler, get_policy
    from .rounding import quantize
    from .scaler import LossScaler, StaticScaler
    from .simulator import load_trace, record_trace, replay, save_trace
    from .step import MixedStep, StepOutcome
    from .tensorcore import fast_half
    from .underflow import note_flushed, probe_flushed
    from .unit import assert_unit_scaled
    from .unit_models import unit_param_groups, unit_scale

_NAMES = {
    'accumulate': ['HalfStorage', 'running_mean'],
    'als': ['ALSScaler'],
    'callback': ['HalfPrecisionCB', 'MixedPrecisionCB'],
    'checkpoint': ['CheckpointCB', 'load_training_state', 'save_training_state'],
    'dynamic': ['DynamicScaler'],
    'formats': ['FloatFormat', 'get_format'],
    'fp8': ['Recipe', 'fp8_linear', 'simulate_fp8'],
    'gradscaler': ['GradScaler'],
    'half': ['model_bytes', 'model_to_float', 'model_to_half', 'saved_bytes'],
    'layerwise': ['LayerwiseScaler'],
    'learner': ['ALSViewCB', 'MonitorCB', 'RunningMeanCB', 'WarnCB'],
    'master': ['get_master', 'to_master_grads', 'to_model_params'],
    'monitor': ['TensorCollector', 'tensor_stats'],
    'overflow': ['OverflowWatch', 'early_warning', 'find_overflow'],
    'policies': ['DeepSpeedScaler', 'FairseqScaler', 'LogMaxScaler', 'MetaseqScaler', 'get_policy'],
    'rounding': ['quantize'],
    'scaler': ['LossScaler', 'StaticScaler'],
    'simulator': ['load_trace', 'record_trace', 'replay', 'save_trace'],
    'step': ['MixedStep', 'StepOutcome'],
    'tensorcore': ['fast_half'],
    'underflow': ['note_flushed', 'probe_flushed'],
    'unit': ['assert_unit_scaled'],
    'unit_models': ['unit_param_groups', 'unit_scale'],
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = list(_MODULE_OF)


def __getattr__(name):
    if name not in _MODULE_OF:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(import_module(f'.{_MODULE_OF[name]}', __name__), name)


def __dir__():
    return sorted([*globals(), *__all__])
