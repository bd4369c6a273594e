"""The paper's experiments, one module each, in the order of :data:`betternorm_lab.experiments.registry.NAMES`.

A module defines an experiment by:

* its docstring: the paper's claims with their numbers, and what to expect;
* ``TITLE`` and ``PLACE``, its place in the paper;
* ``arms(scale)``: its trials by :class:`~betternorm_lab.experiments.arms.Arm`; each is repeated with several seeds.
  ``SEEDS`` overrides their number, by scale;
* ``candidates(scale)``, if hyperparameters are chosen on validation data: the trials to choose from;
* ``conclude(runs)``: tables, figures and a verdict on each claim, from the finished rows of the arms.

The other modules:

* ``scales``: datasets, hyperparameters and number of seeds of each scale;
* ``arms``: what tells the arms of an experiment apart;
* ``findings``: from rows to the cells of a table and the curves of a figure;
* ``claims``: the verdict on a claim;
* ``protocol``: what was fixed before the test set was evaluated, at medium scale;
* ``paper`` and ``against_paper``: the statements of the paper, and our verdicts on them;
* ``trained_networks``: trials on a model that another trial has trained;
* ``registry`` lists the experiments, ``runner`` runs them, ``plan`` estimates their cost, and ``saved_rows`` reads and
  writes the committed tables of trials.
"""
