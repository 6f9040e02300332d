# make course · test · export · check · claims · lab · site · studies · bench · mutants · fuzz · matrix · readme · release
# Each target sets up .venv by itself; a second run installs nothing. settings.ini says what is installed.
PYTHON ?= python3
BIN := .venv/bin
CHAPTERS ?=
STUDIES ?= $(filter-out studies/runner.py studies/torch_casts.py studies/half_chgnet.py,$(wildcard studies/*.py))
OUT ?= _course

.PHONY: help course test export check claims lab site studies bench mutants fuzz matrix readme release
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' Makefile

course: .venv/.installed ## run the chapters and write their pages to _course/ (CHAPTERS="02 05" for some)
	@$(BIN)/python -m tools.course $(CHAPTERS) --out $(OUT)

test: .venv/.installed ## run the checks; a second time only what has changed (ALL=1 for all that CI runs)
	@$(BIN)/python tests/run.py

export: .venv/.installed ## write mpcourse/ from the notebooks: nbdev_export, and from the comments what help() shows
	@$(BIN)/python -m tools.export

check: .venv/.installed ## check your solutions of a chapter (CHAPTER=11 FILE=mine.py)
	@$(BIN)/python -m tools.exercises check $(CHAPTER) $(FILE)

claims: .venv/.installed ## run the chapters under other seeds, threads, instruction sets; only what changed (CLAIMS="--chapters 10 --seeds 0-9 --only seeds")
	@PYTHONPATH=. $(BIN)/python tools/claims.py $(CLAIMS)

lab: .venv/.installed ## open JupyterLab on the notebooks
	@$(BIN)/jupyter lab --notebook-dir=nbs $(LAB)

site: .venv/.installed ## build the site with Quarto in _docs/
	@$(BIN)/python -m tools.site

studies: .venv/.installed ## run the studies over many seeds in studies/ (takes an hour, can be interrupted)
	@for s in $(STUDIES); do $(BIN)/python $$s || exit 1; done

bench: .venv/.installed ## write timings to bench/results/
	@$(BIN)/python bench/run.py $(BENCH)

mutants: .venv/.installed ## break one line at a time, which tests must see (MUTANTS="step als" for some modules)
	@$(BIN)/python tools/mutants.py $(MUTANTS)

fuzz: .venv/.installed ## 100,000 random steps of scalers and models, half an hour (FUZZ=100 for fewer)
	@FUZZ=$(or $(FUZZ),1000) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --timeout 0 -p no:cacheprovider tests/test_fuzz.py

matrix: .venv/.installed ## the library under the oldest and newest Python, torch and fastai; downloads gigabytes (MATRIX=oldest)
	@$(BIN)/python tools/matrix.py $(MATRIX)

readme: .venv/.installed ## run nbs/index.ipynb, and write README.md from it (two minutes)
	@$(BIN)/python -m tools.readme
	@$(BIN)/nbdev_clean --fname nbs/index.ipynb

release: .venv/.installed ## build sdist and wheel, and try the wheel in a fresh environment (DRY=--dry-run for a trial)
	@$(BIN)/python tools/release.py $(DRY)

.venv/.installed: settings.ini setup.py pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "mpcourse needs Python 3.10 or newer, and $(PYTHON) is not: name another one, as in make course PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing into .venv; the first time this takes a few minutes."
	@test -z "$$TORCH_INDEX" || $(BIN)/python -m pip install -qq --index-url "$$TORCH_INDEX" torchvision \
	  "$$(sed -n 's/^dev_requirements = \([^ ]*\).*/\1/p' settings.ini)" # fastai asks for torchvision: a build for another torch does not import
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[dev]'
	@touch $@
