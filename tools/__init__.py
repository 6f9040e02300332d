"What makes pages, README and site out of the notebooks; not part of the wheel"
