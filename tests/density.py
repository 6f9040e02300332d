"""How dense each module is, for each hundred statements: `python tests/density.py` prints it, and stores what has become lower.

Comprehensions, conditional expressions, and assignments of a tuple to a tuple; and lines of more than 100 columns.
The numbers in tests/density.json may only fall: `test_structure.py` compares.
"""
import ast, json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STORE = Path(__file__).with_suffix('.json')
COMPREHENSIONS = ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp


def is_parallel(node):
    "a, b = x, y"
    if not isinstance(node, ast.Assign): return False
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def density(
    text: str, # of a module
) -> dict: # what is counted -> number
    "The four numbers of a module"
    nodes = list(ast.walk(ast.parse(text)))
    statements = sum(isinstance(n, ast.stmt) for n in nodes)
    counts = dict(comprehensions=sum(isinstance(n, COMPREHENSIONS) for n in nodes),
                  conditionals=sum(isinstance(n, ast.IfExp) for n in nodes),
                  parallel=sum(map(is_parallel, nodes)))
    rates = {name: round(100*n/max(statements, 1), 1) for name, n in counts.items()}
    long = [line for line in text.splitlines() if len(line) > 100
            and not line.startswith(('"""', '__all__', ' '*11 + "'", "    ('"))]    # tables
    return rates | dict(long_lines=len(long))


def modules():
    "Every module of the library and every tool with its numbers"
    library = {p.stem: p for p in sorted((ROOT/'mpcourse').glob('[a-z]*.py'))}
    tools = {f'tools/{p.name}': p for p in sorted((ROOT/'tools').glob('[a-z]*.py'))}
    return {name: density(p.read_text(encoding='utf-8')) for name, p in (library | tools).items()}


if __name__ == '__main__':
    stored = json.loads(STORE.read_text()) if STORE.exists() else {}
    found = modules()
    for name, numbers in found.items():
        print(f'{name:12}', *(f'{what} {n:5}' for what, n in numbers.items()))
        old = stored.get(name, numbers)
        found[name] = {what: min(n, old[what]) for what, n in numbers.items()}
    lines = ',\n'.join(f'  {json.dumps(name)}: {json.dumps(numbers)}'
                       for name, numbers in found.items())
    STORE.write_text('{\n' + lines + '\n}\n')
