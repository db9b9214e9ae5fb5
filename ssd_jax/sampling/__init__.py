"""Sampling: keys, parameters, probabilities, penalties, proposals, verification.

Whatever changes the text that a target writes, or how it is drawn, is here; the rest of the package
may only decide what is proposed and prepared.
"""
