"""What compilers say of the programs, for chips that need not be there."""
