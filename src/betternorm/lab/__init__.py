"""The lab: what the experiments of the paper, and a user's own comparison of norm layers, run on.

One way of flow: configuration -> data -> network -> training -> a row in the store.
"""
