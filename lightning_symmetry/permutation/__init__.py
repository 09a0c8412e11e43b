"""Find permutation symmetries of networks, and align networks by them."""
