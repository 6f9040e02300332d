"""nbdev_export, and then docstrings: what a comment says of a parameter goes into help() and editors.

    python -m tools.export

In a notebook each parameter has a comment in its line, fastcore's docments: only the source shows it.
The public names (`_NAMES` in `mpcourse/__init__.py`) and their methods get Args, Returns and Raises."""
import ast, io, re, subprocess, sys, textwrap, tokenize
from pathlib import Path

WIDTH = 100
HEAD = '"What help() shows of the public names: tools/export.py writes it from the comments"'


class Module:
    "The text of a module, its lines, and what its comments say"
    def __init__(self, text:str):
        self.lines = text.split('\n')
        self.comments = {} # line -> text
        for t in tokenize.generate_tokens(io.StringIO(text).readline):
            if t.type == tokenize.COMMENT: self.comments[t.start[0]] = t.string.lstrip('# ')

    def comment(self, line):
        "The comment in a line; if there is none, one that has the line above to itself"
        above = self.lines[line - 2].strip()
        alone = above.startswith('#') and not above.startswith('# %%')
        if line in self.comments or not alone: return self.comments.get(line, '')
        return self.comments[line - 1]

    def end_of_header(self, node):
        "The line of the colon that ends `def …:`"
        depth = 0
        rest = '\n'.join(self.lines[node.lineno - 1:])
        for t in tokenize.generate_tokens(io.StringIO(rest).readline):
            if t.string == ':' and not depth: return node.lineno + t.start[0] - 1
            if t.type == tokenize.OP: depth += (t.string in '([{') - (t.string in ')]}')

    def parameters(self, function):
        "(name, comment) of each parameter that has one; in a header of one line it is the result's"
        if self.end_of_header(function) == function.lineno: return []
        args = function.args
        named = [('', a) for a in (*args.posonlyargs, *args.args)]
        named += [('*', args.vararg), *(('', a) for a in args.kwonlyargs), ('**', args.kwarg)]
        found = []
        for stars, arg in named:
            if arg is None or arg.arg in ('self', 'cls'): continue
            said = self.comment(arg.end_lineno)
            if said: found.append((stars + arg.arg, said))
        return found

    def fields(self, dataclass):
        "As `parameters`"
        found = []
        for n in dataclass.body:
            said = isinstance(n, ast.AnnAssign) and self.comment(n.end_lineno)
            if said: found.append((n.target.id, said))
        return found

    def result(self, function):
        "The comment on what is returned: where the header ends, unless a parameter ends there, too"
        end = self.end_of_header(function)
        args = [a.end_lineno for a in ast.walk(function.args) if isinstance(a, ast.arg)]
        if end in args and end > function.lineno: return []
        return [('', self.comments[end])] if end in self.comments else []


def errors(doc):
    "(name, when it is raised), for each clause of a docstring that names an error"
    clause = r'\b([A-Z]\w*Error(?: or [A-Z]\w*Error)?) (.+?)(?:[.;](?=\s|$)|$)'
    return re.findall(clause, ' '.join(doc.split()))


def section(title, entries):
    "Lines of a docstring"
    if not entries: return []
    lines = ['', f'{title}:']
    for name, said in entries:
        text = f'{name}: {said}'.removeprefix(': ')
        lines += textwrap.wrap(text, WIDTH - 8, initial_indent=' '*4, subsequent_indent=' '*8)
    return lines


def extended(node, module):
    "The docstring of a public function or class with its sections; '' if there is nothing to add"
    doc = ast.get_docstring(node)
    if not doc: return ''
    if isinstance(node, ast.FunctionDef):
        found = section('Args', module.parameters(node)) + section('Returns', module.result(node))
    else:
        inits = [n for n in node.body if getattr(n, 'name', '') == '__init__']
        found = section('Args', module.parameters(*inits) if inits else module.fields(node))
    lines = [*found, *section('Raises', errors(doc))]
    return '\n'.join([doc, *lines]) if lines else ''


def is_patched(node, classes):
    "Is it a function that fastcore's `patch` makes a method of one of these classes?"
    if not isinstance(node, ast.FunctionDef) or not node.args.args: return False
    decorators = ' '.join(map(ast.unparse, node.decorator_list))
    first = node.args.args[0].annotation
    return decorators.startswith('patch') and first is not None and ast.unparse(first) in classes


def is_shown(method):
    "Does help() show it?"
    if not isinstance(method, ast.FunctionDef): return False
    return method.name[0] != '_' or method.name == '__call__'


def public_nodes(tree, names, classes):
    "Functions and classes of these names, their methods, and what is patched into a public class"
    for node in tree.body:
        if is_patched(node, classes) and is_shown(node):
            node.owner = ast.unparse(node.args.args[0].annotation)
            yield node
        elif getattr(node, 'name', '') in names:
            yield node
            if not isinstance(node, ast.ClassDef): continue
            for method in filter(is_shown, node.body):
                method.owner = node.name
                yield method


def documented(
    text:str, # of a module
    names:set, # that are public in it
    classes:set, # names of public classes, of any module
) -> dict: # qualified name -> docstring
    "What the comments of a module say of its public names and their methods"
    module = Module(text)
    found = {}
    for node in public_nodes(ast.parse(text), names, classes):
        owner = getattr(node, 'owner', '')
        doc = extended(node, module)
        if doc: found[f'{owner}.{node.name}'.lstrip('.')] = doc
    return found


def document(package:Path):
    "Write the docstrings of all modules into _docs.py; `mpcourse` gives them to its names"
    init = (package/'__init__.py').read_text(encoding='utf-8')
    public = ast.literal_eval(re.search(r'^_NAMES = (\{.*?^\})', init, re.M | re.S)[1])
    everything = set().union(*public.values())
    docs = {}
    for path in sorted(package.glob('[!_]*.py')):
        names = set(public.get(path.stem, ()))
        docs |= documented(path.read_text(encoding='utf-8'), names, everything)
    lines = [f'    {name!r}: {doc!r},' for name, doc in sorted(docs.items())]
    text = '\n'.join([HEAD, '', 'DOCS = {', *lines, '}', ''])
    (package/'_docs.py').write_text(text, encoding='utf-8')


def main() -> int: # exit code
    "Export, then document"
    code = subprocess.run([Path(sys.executable).parent/'nbdev_export']).returncode
    if not code: document(Path('mpcourse'))
    return code


if __name__ == '__main__': sys.exit(main())
