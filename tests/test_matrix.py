"The oldest and the newest that the pins allow (`make matrix` installs and tests them)"
import re, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT/'tools'))
import matrix


def test_the_oldest_is_what_the_pins_begin_with():
    assert matrix.pinned('torch>=2.6 fastai>=2.8.7 numpy') == ['torch==2.6.*', 'fastai==2.8.7', 'numpy']
    ours = dict(zip(matrix.settings()['requirements'].split(), matrix.pinned(matrix.settings()['requirements'])))
    assert ours['torch>=2.6'] == 'torch==2.6.*' and all('>' not in pin for pin in ours.values())


def test_interpreters_are_in_order_and_start():
    found = matrix.interpreters(matrix.settings()['min_python'])
    assert found == sorted(found) and all(matrix.works(python) for _, python in found)


def test_the_workflow_runs_both_rows_with_the_oldest_python():
    text = (ROOT/'.github/workflows/matrix.yml').read_text(encoding='utf-8')
    rows = dict(re.findall(r"row: (\w+), python: '([\d.]+)'", text))
    assert set(rows) == {'oldest', 'newest'} and rows['oldest'] == matrix.settings()['min_python']
    assert 'python tools/matrix.py ${{ matrix.row }}' in text
