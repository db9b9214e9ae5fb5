"""What runs on devices: the target's and the draft's compiled programs, and who dispatches them."""
