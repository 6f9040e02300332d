"tests/mission.md: every row of the mission has a line, and every test that it names exists"
import ast, re
from pathlib import Path

from conftest import each


HERE = Path(__file__).parent
ROWS = [f'M{i}' for i in range(1, 32)] + [f'P{i}' for i in range(1, 17)] + [f'N{i}' for i in (*range(1, 26), 29, 33, 34, 35)]
LINES = [[c.strip() for c in l.strip('|').split('|')] for l in (HERE/'mission.md').read_text(encoding='utf-8').splitlines()
         if re.match(r'\| [MPN]\d', l)]


def names_in(file):
    "Names of the test functions of a file, by reading it"
    tree = ast.parse((HERE/file).read_text(encoding='utf-8'))
    return {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name.startswith('test_')}


def test_every_row_has_one_line(): assert [l[0] for l in LINES] == ROWS


@each('row, short, shown', LINES)
def test_what_shows_it_is_there(row, short, shown):
    chapters = {p.stem.split('_', 1)[1] for p in (HERE.parent/'nbs').glob('[0-9]*.ipynb')}
    tests, named = re.findall(r'`([^`]+)::(test_\w+)`', shown), re.findall(r'chapter (\w+)', shown)
    assert short and (tests or named or re.search(r'issue \d+', shown)), f'{row} is shown by nothing'
    assert shown.count('`') == 2*len(tests), f'{row}: a test is written as `file::name`'
    for file, name in tests: assert name in names_in(file), f'{row}: there is no {file}::{name}'
    for c in named: assert c in chapters, f'{row}: there is no chapter {c}'
