"""Verification: from a target's logits to the tokens that it accepts, and the token behind them."""
