"""Slides of the chapters that `make course` ran: `python -m tools.slides 04 07 --out slides.html`

A figure and its caption, which is its finding as a sentence, make a slide. A cell with the tag `slide` makes one of the
sentence before it, its code and what it printed. `python -m tools.slides 87 --questions 1 2 3` writes questions of appendix 87,
and behind them the same with their answers. The page needs nothing else. The arrow keys turn the slides, figures that
move work in the page, and a print has one slide on each sheet.
"""
import argparse, re, sys
from html import escape
from pathlib import Path

import nbformat
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from tools.course import ROOT, chapters, executed
from tools.pages import directives, is_hidden, markdown, Renderer

FORMAT = HtmlFormatter(style='xcode', nowrap=True)
STYLE = FORMAT.get_style_defs('pre.code') + '''
html { scroll-snap-type: y mandatory; } body { margin: 0; font: 1.5rem/1.4 system-ui, sans-serif; color: #1d2530; background: #fff; }
section { box-sizing: border-box; min-height: 100vh; scroll-snap-align: start; page-break-after: always; padding: 3vh 4vw;
  display: flex; flex-direction: column; justify-content: center; }
h1 { font-size: 1.1rem; color: #5b6675; font-weight: 400; margin: .5rem 0; } p { margin: .7rem 0; } h2 { font-size: 3rem; margin: 0; } h3 { font-size: 2rem; }
pre { font: 1.2rem/1.35 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre-wrap; margin: .4rem 0; padding: .6rem .9rem; }
pre.code { background: #f5f6f8; } pre.out { border-left: .3rem solid #D55E00; }
@page { size: A4 landscape; margin: 0; }
table { border-collapse: collapse; align-self: start; font-size: 1rem; } td, th { padding: .1rem .5rem; text-align: right; border: 0; border-bottom: 1px solid #c9ced6; }
section > img, .mp-live > img { max-width: 100%; max-height: 62vh; object-fit: contain; margin: auto; display: block; width: min(100%, 70rem); }'''
KEYS = '''addEventListener('keydown', e => {
  const step = { ArrowRight: 1, PageDown: 1, ArrowLeft: -1, PageUp: -1 }[e.key];
  if (!step || e.target.matches('input, select, textarea')) return;
  e.preventDefault();
  const all = [...document.querySelectorAll('section')], at = all.filter(s => s.offsetTop <= scrollY + 9).length - 1;
  all[Math.min(Math.max(at + step, 0), all.length - 1)].scrollIntoView();   // some figures are higher than the screen
});'''


def picture(cell, alt):
    "What a cell with a caption shows, as html; '' where it is no picture"
    for out in cell.get('outputs', []):
        data = out.get('data', {})
        moves = ''.join(data.get('text/html', ''))
        if 'mp-live' in moves: return moves
        if 'image/png' in data: return f'<img alt="{escape(alt)}" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
    return ''


def ending(text, most=250):
    "The last sentence of a paragraph, with those before it that fit into so many characters or that it points to"
    sentences = re.split(r'(?<=[.?!]) (?=[^a-z])', text)
    kept = sentences.pop()
    def unclear(): return re.match(r'\(|(These|Those|That|This|It|They|Some|Both|So|But|Then) ', kept)
    while sentences and (unclear() or len(sentences[-1]) + len(kept) < most): kept = f'{sentences.pop()} {kept}'
    return kept


def sentence(cells, i):
    "What is said just before a cell, as html; '' where other code that is shown stands between"
    for c in reversed(cells[:i]):
        if c.cell_type == 'markdown':
            plain = re.sub(r'\[([^]]+)\]\([^)]*\)', r'\1', c.source.strip().split('\n')[-1])
            return markdown(ending(plain), Renderer(ROOT/'nbs', None), inline=True)
        d = directives(c.source)[0]
        if not is_hidden(d) and not d.get('code-fold'): break
    return ''


def printed(cell):
    "What a cell printed, as html"
    parts = []
    for out in cell.get('outputs', []):
        data = out.get('data', {})
        if out.get('name') == 'stdout' or 'text/plain' in data and 'text/html' not in data:
            parts.append(f'<pre class="out">{escape(out.get("text") or data.get("text/plain")).rstrip()}</pre>')
        parts += [''.join(data.get('text/html', ''))]
    return ''.join(parts)


def narrow(code):
    "Code whose comments stand close to it, or above it where the line would be wrapped"
    code = re.sub(r' {3,}#', '  #', code)
    return re.sub(r'^(?=.{96})( *)(\S.*?) +(# [^\'"\n]*)$', r'\1\3\n\1\2', code, flags=re.M)


def code_slide(title, cells, i):
    "The sentence before a cell, its code, and what it printed"
    said = sentence(cells, i)
    shown = highlight(narrow(directives(cells[i].source)[1].strip()), PythonLexer(), FORMAT).rstrip()
    return f'<section><h1>{escape(title)}</h1>{said and f"<p>{said}</p>"}<pre class="code">{shown}</pre>{printed(cells[i])}</section>'


def tagged(path):
    "The ids of the cells with the tag `slide`, as the notebook has them now"
    return {c.id for c in nbformat.read(path, as_version=4).cells if 'slide' in c.metadata.get('tags', ())}


def question_slides(
    nb: dict,     # appendix 87, executed
    wanted: list, # numbers of questions
) -> str: # html
    "A slide for each question, to vote on, and then one for each answer with its reason"
    shown = ''.join(printed(c) for c in nb.cells if c.cell_type == 'code')
    boxes, votes, answers = re.findall(r'<fieldset>(.*?)</fieldset>', shown, re.S), [], []
    if wrong := [n for n in wanted if not 1 <= n <= len(boxes)]: sys.exit(f'There is no question {wrong[0]}: there are {len(boxes)}.')
    for box in (boxes[n - 1] for n in wanted):
        ask = f'<h3>{re.search("<legend>(.*?)</legend>", box)[1]}</h3>'
        choices = ''.join(f'<p>{text}</p>' for text in re.findall(r'<input[^>]*>(.*?)</label>', box))
        answer = re.search(r'<b class="no">(.*?)</b>(.*?)\(<a', box)
        votes.append(f'<section>{ask}{choices}</section>')
        answers.append(f'<section>{ask}<p><b>{answer[1]}</b></p><p>{answer[2]}</p></section>')
    return ''.join([*votes, '<section><h2>Answers</h2></section>', *answers])


def document(body):
    "A whole page of slides"
    return (f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>mpcourse</title><style>{STYLE}</style></head>'
            f'<body>{body}<script>{KEYS}</script></body></html>')


def slides(
    found: list, # (chapter, executed notebook) pairs
) -> str: # a whole html document
    "A title for each chapter, then its figures with their captions, and the code of its tagged cells"
    parts = []
    for ch, nb in found:
        parts.append(f'<section><h1>{escape(ch.number)}</h1><h2>{escape(ch.title)}</h2><p>{escape(ch.promise)}</p></section>')
        chosen = tagged(ch.path)
        for i, cell in enumerate(nb.cells):
            if cell.get('id') in chosen: parts.append(code_slide(ch.title, nb.cells, i))
            d = directives(cell.source)[0] if cell.cell_type == 'code' else {}
            caption = d.get('fig-cap', '')
            is_map = caption.startswith('You are here')     # it needs the page around it
            if caption and not is_map and (shown := picture(cell, d.get('fig-alt', ''))):
                parts.append(f'<section><h1>{escape(ch.title)}</h1>{shown}<p>{escape(caption)}</p></section>')
    return document(''.join(parts))


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('chapters', nargs='*', help='their numbers; by default all that were run')
    p.add_argument('--out', type=Path, help='slides.html, or questions.html with --questions')
    p.add_argument('--pages', type=Path, default=ROOT/'_course', help='the folder where `make course` left the pages (%(default)s)')
    p.add_argument('--questions', nargs='+', type=int, help='of appendix 87, by their numbers')
    a = p.parse_args()
    wanted = [ch for ch in chapters(ROOT/'nbs') if not a.chapters or ch.number in a.chapters]
    found = [(ch, nb) for ch in wanted if (nb := executed(ch, a.pages)) is not None]
    if not found: return f'None of these chapters has been run into {a.pages}: run `make course` first, or name the folder with --pages.'
    page = document(question_slides(found[0][1], a.questions)) if a.questions else slides(found)
    out = a.out or Path('questions.html' if a.questions else 'slides.html')
    out.write_text(page, encoding='utf-8')
    print(f'The slides of {len(found)} chapters are in {out}')


if __name__ == '__main__': sys.exit(main())
