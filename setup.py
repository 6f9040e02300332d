"Read `settings.ini`, the one place for metadata and requirements, and hand it to setuptools."
import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

parser = ConfigParser(delimiters=['='])
parser.read(Path(__file__).parent/'settings.ini', encoding='utf-8')
cfg = parser['DEFAULT']
extras = {k.removesuffix('_requirements'): v.split() for k,v in cfg.items() if k.endswith('_requirements')}
extras['all'] = sorted({r for k,v in extras.items() if k != 'dev' for r in v})

def absolute_links(text):
    "A package index has no files beside the README"
    here = cfg['git_url']
    text = re.sub(r'!\[(.*?)\]\((?!https?:)', rf'![\1]({here}/raw/{cfg["branch"]}/', text)
    return re.sub(r'(?<!!)\[([^]]*)\]\((?!https?:|#)', rf'[\1]({here}/blob/{cfg["branch"]}/', text)

setup(
    name=cfg['lib_name'], version=cfg['version'], description=cfg['description'], keywords=cfg['keywords'].split(),
    long_description=absolute_links((Path(__file__).parent/'README.md').read_text(encoding='utf-8')),
    long_description_content_type='text/markdown',
    author=cfg['author'], author_email=cfg['author_email'], url=cfg['git_url'], license='Apache-2.0',
    classifiers=['Development Status :: 3 - Alpha', 'Intended Audience :: Developers', 'Intended Audience :: Education',
                 'Programming Language :: Python :: 3', 'Topic :: Scientific/Engineering :: Artificial Intelligence'],
    packages=find_packages(include=[cfg['lib_path'], cfg['lib_path'] + '.*']), include_package_data=True,
    python_requires='>=' + cfg['min_python'], install_requires=cfg['requirements'].split(), extras_require=extras,
    entry_points={'console_scripts': cfg['console_scripts'].split(), 'nbdev': ['mpcourse=mpcourse._modidx:d']},
    zip_safe=False)
