"""The paper's experiments, one module each, in the order of :data:`betternorm_lab.experiments.registry.NAMES`.

An experiment declares, in its own module:

* its docstring: what the paper claims, in numbers, and what to expect;
* ``TITLE`` and ``PLACE``, its place in the paper;
* ``arms(scale)``: its trials by label, one for each arm; every arm is repeated with other seeds. ``SEEDS`` says how
  often, by scale, where it is not as usual;
* ``candidates(scale)``, if hyperparameters are still to be chosen on validation data: the trials to choose among;
* ``conclude(runs)``: tables, figures and a verdict on each claim, from the finished rows of the arms.

The modules beside them:

* ``scales``: what each scale is, its datasets and hyperparameters, and the usual number of seeds;
* ``findings``: how rows become the cells of a table and the curves of a figure;
* ``claims``: how a claim is judged;
* ``protocol``: what was settled before the test set was read, at the medium scale;
* ``paper``: what the paper states, and which verdict judges it;
* ``trained_networks``: trials on a network that another trial has trained;
* ``registry`` lists the experiments, ``runner`` runs them, ``plan`` says what that would take, and ``saved_rows`` reads
  rows back from the pages of results.
"""
