"""The reproduction: datasets, models, training and experiments, on top of the library `betternorm`.

Data flows one way: configuration -> data -> model -> training -> a row in the store -> figures.
"""

__version__ = "0.2.0"
