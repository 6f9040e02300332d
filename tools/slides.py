"""Slides from the figures of the chapters that `make course` ran: `python -m tools.slides 04 07 --out slides.html`

A figure and its caption, which is its finding as a sentence, make a slide. The page needs nothing else. The arrow keys turn
the slides, figures that move work in the page, and a print has one slide on each sheet.
"""
import argparse, sys
from html import escape
from pathlib import Path

from tools.course import ROOT, chapters, executed
from tools.pages import directives

STYLE = '''html { scroll-snap-type: y mandatory; } body { margin: 0; font: 1.5rem/1.4 system-ui, sans-serif; color: #1d2530; background: #fff; }
section { box-sizing: border-box; min-height: 100vh; scroll-snap-align: start; page-break-after: always; padding: 3vh 6vw;
  display: flex; flex-direction: column; justify-content: center; }
h1 { font-size: 1.1rem; color: #5b6675; font-weight: 400; } h2 { font-size: 3rem; margin: 0; }
section > img, .mp-live > img { max-width: 100%; max-height: 62vh; object-fit: contain; margin: auto; display: block; width: min(100%, 70rem); }'''
KEYS = '''addEventListener('keydown', e => {
  const step = { ArrowRight: 1, PageDown: 1, ArrowLeft: -1, PageUp: -1 }[e.key];
  if (!step || e.target.matches('input, select, textarea')) return;
  e.preventDefault();
  scrollTo(0, (Math.round(scrollY / innerHeight) + step) * innerHeight);
});'''


def picture(cell, alt):
    "What a cell with a caption shows, as html; '' where it is no picture"
    for out in cell.get('outputs', []):
        data = out.get('data', {})
        moves = ''.join(data.get('text/html', ''))
        if 'mp-live' in moves: return moves
        if 'image/png' in data: return f'<img alt="{escape(alt)}" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
    return ''


def slides(
    found: list, # (chapter, executed notebook) pairs
) -> str: # a whole html document
    "A title for each chapter, then its figures with their captions"
    parts = []
    for ch, nb in found:
        parts.append(f'<section><h1>{escape(ch.number)}</h1><h2>{escape(ch.title)}</h2><p>{escape(ch.promise)}</p></section>')
        for cell in nb.cells:
            d = directives(cell.source)[0] if cell.cell_type == 'code' else {}
            if 'fig-cap' in d and (shown := picture(cell, d.get('fig-alt', ''))):
                parts.append(f'<section><h1>{escape(ch.title)}</h1>{shown}<p>{escape(d["fig-cap"])}</p></section>')
    return (f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>mpcourse</title><style>{STYLE}</style></head>'
            f'<body>{"".join(parts)}<script>{KEYS}</script></body></html>')


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('chapters', nargs='*', help='their numbers; by default all that were run')
    p.add_argument('--out', type=Path, default=Path('slides.html'))
    a = p.parse_args()
    wanted = [ch for ch in chapters(ROOT/'nbs') if not a.chapters or ch.number in a.chapters]
    found = [(ch, nb) for ch in wanted if (nb := executed(ch, ROOT/'_course')) is not None]
    if not found: return 'None of these chapters has been run: run `make course` first.'
    a.out.write_text(slides(found), encoding='utf-8')
    print(f'The slides of {len(found)} chapters are in {a.out}')


if __name__ == '__main__': sys.exit(main())
