"What an import costs and needs: each in a process of its own"
import subprocess, sys

import pytest

pytestmark = pytest.mark.library


def python(code): return subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=200)


def test_the_drop_in_scaler_needs_no_pandas():
    r = python("import sys; sys.modules['pandas'] = None; import mpcourse.gradscaler as g, mpcourse.policies as p; g.GradScaler(p.get_policy('megatron'))")
    assert r.returncode == 0, r.stderr


@pytest.mark.parametrize('module', ['unit', 'unit_models'])
def test_unit_scaling_loads_no_compiler(module):
    r = python(f"import sys, mpcourse.{module}; print('torch._dynamo' in sys.modules)")
    assert r.stdout == 'False\n', r.stderr
