"Tables that notebooks hold (chapters, exercises, names), and README.md from the index notebook and its stored outputs: `python -m tools.readme`"
import ast, base64, json, re
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from tools.course import PARTS, chapters
from tools.exercises import all_exercises
from tools.pages import directives, is_hidden

ROOT = Path(__file__).resolve().parent.parent
LOCAL = r'(?!https?:|/|#|\.\./|mailto:)'


def first_sentence(text): return re.split(r'(?<=[.?!]) ', text)[0].rstrip('.')


def chapter_table(
    nbs: Path=ROOT/'nbs', # the folder of notebooks
) -> str: # Markdown
    "The table of chapters: number, title, minutes and the first sentence of the promise, as the chapters themselves say them"
    rows = ['| | chapter | minutes | what breaks |', '|---|---|--:|---|']
    heads = {f'{k:02}': v.partition(' · ') for k, v in PARTS.items() if v}
    for ch in chapters(nbs)[1:]:
        if ch.number in heads:
            part, _, title = heads[ch.number]
            rows.append(f'| {f"**{part[5:]}**" if title else ""} | **{title or part}** | |  |')
        rows.append(f'| {ch.number} | [{ch.title}]({ch.path.name}) | {ch.minutes} | {first_sentence(ch.promise)} |')
    return '\n'.join(rows)


def exercise_table(
    nbs: Path=ROOT/'nbs', # not used: the exercises are those of this clone
) -> str: # Markdown
    "All exercises: number, title, points, and the name of what is to be written"
    rows = ['| | exercise | points | to write |', '|---|---|--:|---|']
    for e in all_exercises(): rows.append(f'| [{e.id}]({e.notebook.name}#exercises) | {e.title} | {e.level} | `{e.name}` |')
    return '\n'.join(rows)


def name_table(
    nbs: Path=ROOT/'nbs', # the folder of notebooks
) -> str: # Markdown
    "All public names of the library: the chapter that builds it, and the first line of its docstring"
    rows = {}
    for path in sorted((nbs.parent/'mpcourse').glob('[a-z]*.py')):
        text = path.read_text(encoding='utf-8')
        notebook, body = re.search(r'File to edit: \.\./nbs/(\w+\.ipynb)', text), ast.parse(text).body
        if not notebook: continue
        for node in body:
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name[0] == '_': continue
            if any('patch' in ast.dump(d) for d in node.decorator_list): continue
            first = (ast.get_docstring(node) or '').partition('\n')[0].replace('|', '\\|')
            rows[node.name] = f'| `{node.name}` | [{notebook[1][:2]}]({notebook[1]}) | {first} |'
    return '\n'.join(['| name | chapter | what it is |', '|---|---|---|', *(rows[n] for n in sorted(rows, key=str.lower))])


TABLES = {'index.ipynb': ('## The chapters', chapter_table), '96_teaching.ipynb': ('## The exercises', exercise_table),
          '99_glossary.ipynb': ('## All names', name_table)}


def with_table(
    text: str, # of a notebook
    heading: str='## The chapters', # of the cell with the table
    table=chapter_table, # folder -> Markdown
    nbs: Path=ROOT/'nbs', # the folder of notebooks
) -> str: # the same text with a current table
    "Put the current table in the place of the old one"
    nb = json.loads(text)
    for c in nb['cells']:
        source = ''.join(c['source'])
        if not source.startswith(heading): continue
        c['source'] = re.sub(r'(^\|.*\n?)+', lambda m: table(nbs), source, flags=re.M).splitlines(True)
    return json.dumps(nb, indent=1, ensure_ascii=False) + '\n'


def slim(
    out: dict, # an output, as the kernel gave it
) -> dict: # the same without what README.md does not show
    "A picture alone, where there is one; no execution counts"
    if out.output_type == 'stream': return out
    if 'image/png' in out.data: out.data = {'image/png': out.data['image/png']}
    out.metadata = {}
    if 'execution_count' in out: out.execution_count = None
    return out


def still(
    out: dict, # an output
) -> dict: # the picture that a live figure holds; another output as it is
    "What stands where scripts do not run"
    png = re.search('<img [^>]*src="data:image/png;base64,([^"]+)"', out.get('data', {}).get('text/html', ''))
    return nbformat.v4.new_output('display_data', {'image/png': png[1]}) if png else out


def keep_shown(
    cell: dict, # a code cell that has been run; changed in place
):
    "Keep the outputs that README.md can show: no warnings, nothing hidden, of a figure that needs a script at most its still picture"
    d = directives(cell.source)[0]
    if d.get('readme') == 'still': cell.outputs = [still(o) for o in cell.outputs]
    def shown(o): return o.get('name') != 'stderr' and '<script' not in o.get('data', {}).get('text/html', '')
    cell.outputs = [] if is_hidden(d) else [slim(o) for o in cell.outputs if shown(o)]
    cell.execution_count = None


def executed(
    path: Path, # of a notebook
) -> dict: # the notebook, run anew
    "Run a notebook, and keep what it prints"
    nb = nbformat.read(path, as_version=4)
    NotebookClient(nb, timeout=600, resources=dict(metadata=dict(path=str(path.parent))), record_timing=False).execute()
    for cell in nb.cells:
        if cell.cell_type != 'code': continue
        keep_shown(cell)
    return nb


def output_text(
    out: dict, # an output of the index notebook
    save,      # called with a picture's bytes, returns its path for the README
    alt: str,  # the picture's alt text
) -> str: # Markdown
    "An output as Markdown"
    if out.output_type == 'stream': return f'```\n{out.text.rstrip()}\n```'
    if 'image/png' in out.data: return f'![{alt}]({save(base64.b64decode(out.data["image/png"]))})'
    rich = out.data.get('text/markdown') or out.data.get('text/html')
    return rich.strip() if rich else f'```\n{out.data["text/plain"].rstrip()}\n```'


def cell_text(
    cell: dict, # a cell of the index notebook
    save,       # called with a picture's bytes, returns its path for the README
) -> str: # Markdown, '' for a cell that is not shown
    "A cell as Markdown"
    if cell.cell_type != 'code': return re.sub(r'^:{3,}.*\n?', '', cell.source, flags=re.M).strip()
    d, code = directives(cell.source)
    if is_hidden(d): return ''
    shown = '' if d.get('echo') is False else f'```python\n{code.strip()}\n```'
    if shown and d.get('code-fold'): shown = f'<details><summary>Imports</summary>\n\n{shown}\n\n</details>'
    outs = [output_text(o, save, d.get('fig-alt', '')) for o in cell.outputs]
    caption = f'*{d["fig-cap"]}*' if outs and 'fig-cap' in d else ''
    return '\n\n'.join(filter(None, [shown, *outs, caption]))


def readme(
    nbs: Path, # the folder of notebooks
    index: dict=None, # the index notebook with its outputs; None: as it is stored
) -> dict: # path → bytes: README.md and the pictures that it shows
    "What `write_readme` writes"
    pictures = {}
    def save(png):
        name = f'images/index_{len(pictures) + 1}.png'
        pictures[nbs/name] = png
        return name
    cells = (index or nbformat.read(nbs/'index.ipynb', as_version=4)).cells
    body = '\n\n'.join(filter(None, [cell_text(c, save) for c in cells]))
    body = re.sub(rf'(\]\(|(?:src|href)="){LOCAL}(?=[^)\s"]+[)"])', rf'\1{nbs.name}/', body)
    body = re.sub(r'\]\(\.\./([^)\s]+\))', r'](\1', body)
    text = f'<!-- made from {nbs.name}/index.ipynb by `make readme`: edit that -->\n\n{body}\n'
    return {nbs.parent/'README.md': text.encode(), **pictures}


def current_tables(nbs):
    "Notebook → its text with a current table"
    return {p: with_table(p.read_text(encoding='utf-8'), *TABLES[p.name], nbs) for p in nbs.glob('*.ipynb') if p.name in TABLES}


def write_readme(
    nbs: Path=ROOT/'nbs', # the folder of notebooks
) -> list: # the files
    "Bring the tables up to date, run the index notebook, and write README.md and its pictures from what it prints"
    for path, text in current_tables(nbs).items(): path.write_text(text, encoding='utf-8')
    index = nbs/'index.ipynb'
    index.write_text(json.dumps(executed(index), indent=1, ensure_ascii=False) + '\n', encoding='utf-8')
    files = readme(nbs)
    for path, data in files.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    return list(files)


def readme_current(
    nbs: Path=ROOT/'nbs', # the folder of notebooks
) -> bool: # whether README.md and its pictures are what the index notebook says
    "Whether the tables and README.md are what `write_readme` would write"
    same = all(path.read_text(encoding='utf-8') == text for path, text in current_tables(nbs).items())
    return same and all(path.exists() and path.read_bytes() == data for path, data in readme(nbs).items())


if __name__ == '__main__': print(*write_readme())
