"The index notebook's table of chapters, and README.md from that notebook and its stored outputs: `python -m tools.readme`"
import base64, json, re
from pathlib import Path

import nbformat

from tools.course import PARTS, chapters
from tools.pages import directives, is_hidden

ROOT = Path(__file__).resolve().parent.parent
LOCAL = r'(?!https?:|/|#|\.\./|mailto:)'


def chapter_table(
    nbs: Path=ROOT/'nbs', # the folder of notebooks
) -> str: # Markdown
    "The table of chapters: number, title, minutes and promise, as the chapters themselves say them"
    rows = ['| | chapter | minutes | what breaks, and what you own at the end |', '|---|---|--:|---|']
    heads = {f'{k:02}': v.partition(' · ') for k, v in PARTS.items() if v}
    for ch in chapters(nbs)[1:]:
        if ch.number in heads:
            part, _, title = heads[ch.number]
            rows.append(f'| {f"**{part[5:]}**" if title else ""} | **{title or part}** | |  |')
        minutes = re.search(r'(\d+) minutes to read', ch.path.read_text(encoding='utf-8'))
        rows.append(f'| {ch.number} | [{ch.title}]({ch.path.name}) | {minutes[1] if minutes else ""} | {ch.promise} |')
    return '\n'.join(rows)


def with_table(
    text: str, # of the index notebook
    nbs: Path=ROOT/'nbs', # the folder of notebooks
) -> str: # the same text with a current table
    "Put the current table of chapters in the place of the old one"
    nb = json.loads(text)
    for c in nb['cells']:
        source = ''.join(c['source'])
        if not source.startswith('## The chapters'): continue
        c['source'] = re.sub(r'(^\|.*\n?)+', lambda m: chapter_table(nbs), source, flags=re.M).splitlines(True)
    return json.dumps(nb, indent=1, ensure_ascii=False) + '\n'


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
) -> dict: # path → bytes: README.md and the pictures that it shows
    "What `write_readme` writes"
    pictures = {}
    def save(png):
        name = f'images/index_{len(pictures) + 1}.png'
        pictures[nbs/name] = png
        return name
    cells = nbformat.read(nbs/'index.ipynb', as_version=4).cells
    body = '\n\n'.join(filter(None, [cell_text(c, save) for c in cells]))
    body = re.sub(rf'(\]\(|(?:src|href)="){LOCAL}(?=[^)\s"]+[)"])', rf'\1{nbs.name}/', body)
    body = re.sub(r'\]\(\.\./([^)\s]+\))', r'](\1', body)
    text = f'<!-- made from {nbs.name}/index.ipynb by `make readme`: edit that -->\n\n{body}\n'
    return {nbs.parent/'README.md': text.encode(), **pictures}


def write_readme(
    nbs: Path=ROOT/'nbs', # the folder of notebooks
) -> list: # the files
    "Bring the index notebook's table of chapters up to date, then write README.md and its pictures from it"
    index = nbs/'index.ipynb'
    index.write_text(with_table(index.read_text(encoding='utf-8'), nbs), encoding='utf-8')
    files = readme(nbs)
    for path, data in files.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    return list(files)


def readme_current(
    nbs: Path=ROOT/'nbs', # the folder of notebooks
) -> bool: # whether README.md and its pictures are what the index notebook says
    "Whether the index notebook and README.md are what `write_readme` would write"
    text = (nbs/'index.ipynb').read_text(encoding='utf-8')
    return text == with_table(text, nbs) and all(path.exists() and path.read_bytes() == data for path, data in readme(nbs).items())


if __name__ == '__main__': print(*write_readme())
