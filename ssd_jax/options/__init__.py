"""How settings of any kind are declared, named, read and worded."""
