"""How good a policy is, measured against the best one that is possible.

Knows runs, policies and rewards; trains nothing.
"""
