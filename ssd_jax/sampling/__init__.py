"""Sampling: keys, parameters, probabilities, penalties, proposals, verification.

Everything that changes a target's text, or how it is drawn, is here; the rest of the package may
only decide what is proposed and prepared.
"""
