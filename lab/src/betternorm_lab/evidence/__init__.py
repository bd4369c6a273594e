"""Round 3: experiments with enough seeds or images to decide a practical question, with per-image results.

``docs/results/protocol.md`` ("Round 3") declares the primary claims and the analysis before any test set is read.
Run them with ``python -m betternorm_lab.evidence NAME``; ``docs/results/evidence/`` has the rows and the pages.
"""
